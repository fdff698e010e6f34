"""Backends execute plans. Each is a module with

``RATES``
    what the device does per second, for choosing plans,
``unavailable_reason(device) -> str | None``
    why it cannot serve tensors of that device, in one sentence, or None,
``run(weights, plans, with_grad) -> (losses, grads)``
    one 0-dim loss per weight in the accumulation dtype and one gradient per weight in its own dtype, empty where
    ``with_grad`` says False; none of them with a graph,
``OPTIONS``
    optional: names of further keyword arguments of ``run``, each a string,
``ONLY_ON_REQUEST``
    optional: device types that it serves only when it is asked for by name.
"""

from __future__ import annotations

import os
import warnings
from types import ModuleType

import torch

from . import cpu, cuda, pytorch, triton

#: By name, in the order in which they are preferred.
BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "triton": triton, "cuda": cuda, "torch": pytorch}

_warned: set[str] = set()


def encode(backend: str | None, **options: str | None) -> str:
    """A backend and its options as the one string that an op takes: ``triton;precision=tf32``."""
    return ";".join([backend or "", *(f"{name}={value}" for name, value in options.items() if value is not None)])


def decode(text: str) -> tuple[str | None, dict[str, str]]:
    """The backend, or None for the default, and the options."""
    name, *options = text.split(";")
    return name or None, dict(option.split("=", 1) for option in options)  # type: ignore[misc]


def accepted(module: ModuleType, options: dict[str, str]) -> dict[str, str]:
    """The options that a backend has; the others say nothing to it (a CPU has no TF32)."""
    return {name: value for name, value in options.items() if name in getattr(module, "OPTIONS", ())}


def default_name() -> str | None:
    """What the user wants where nothing is asked for."""
    return os.environ.get("OCNN_FUSED_BACKEND") or None


def choose(device: torch.device, name: str | None = None) -> ModuleType:
    """The backend called ``name``, or the first to serve ``device``; ``OCNN_FUSED_BACKEND`` is the default name."""
    name = name or default_name()
    if name is not None:
        if name not in BACKENDS:
            raise ValueError(f"backend must be None or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
        reason = BACKENDS[name].unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(f"backend {name!r} is not available: {reason}")
        return BACKENDS[name]
    reasons: dict[str, str] = {}
    for candidate, module in BACKENDS.items():
        if device.type in getattr(module, "ONLY_ON_REQUEST", ()):
            continue
        reason = module.unavailable_reason(device)
        if reason is None:
            _warn_if_slower(candidate, device, reasons)
            return module
        reasons[candidate] = reason
    raise RuntimeError(f"no backend serves {device}: {reasons}")


def _warn_if_slower(chosen: str, device: torch.device, reasons: dict[str, str]) -> None:
    """Say once per kind of device why no compiled backend serves it."""
    if chosen != "torch" or device.type in _warned:
        return
    _warned.add(device.type)
    own = ("cpu",) if device.type == "cpu" else ("triton", "cuda")
    relevant = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if name in own)
    warnings.warn(
        f"ocnn_fused runs its plans through PyTorch on {device.type}, "
        f"which is slower than a compiled backend: {relevant}",
        RuntimeWarning,
        stacklevel=2,
    )
