"""Backends execute plans. Each is a module that has what :class:`Backend` lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch

from ..plan import AnyPlan, Plan
from ..problem import BACKENDS, Options, Precision
from ..warn import warn
from . import cpu, cuda, pytorch, triton
from .job import Executable, Job


class Backend(Protocol):
    """A way to execute plans on some devices."""

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why it cannot serve tensors of that device, in one sentence, or None."""

    def resolve_precision(self, precision: Precision | None, device: torch.device, linear: bool) -> Precision:
        """The precision that float32 products have if this one is asked for; None does what PyTorch would do.

        That is: for the layer itself, ``linear`` or a convolution, on that device and with the settings of now.
        """

    def takes(self, plan: AnyPlan, dtype: torch.dtype) -> bool:
        """Whether it executes a plan for weights of ``dtype``; only Fourier plans may be left to PyTorch's calls."""

    def refusal(self, plan: Plan, dtype: torch.dtype, device: torch.device, precision: Precision) -> str | None:
        """Why a plan is never chosen for weights of ``dtype``, or None; some plan always serves."""

    def seconds(self, plan: Plan, dtype: torch.dtype, device: torch.device, precision: Precision) -> float:
        """Estimated time of loss and gradient, for comparing plans."""

    def prepare(self, jobs: Sequence[Job[Plan]], device: torch.device, options: Options) -> Executable:
        """What executes the plans of these jobs, many times; each says the precision of its products."""


#: By name, in the order in which they are preferred.
MODULES: dict[str, Backend] = dict(zip(BACKENDS, (cpu, triton, cuda, pytorch), strict=True))

#: Device types that a backend serves only if it is asked for by name: there only Triton's interpreter runs.
_ONLY_ON_REQUEST = {"triton": "cpu"}

#: What the user wants where nothing is asked for; read once, when the package is imported.
DEFAULT = os.environ.get("OCNN_FUSED_BACKEND") or None

_warned: set[str] = set()


def choose(device: torch.device, name: str | None = None) -> str:
    """Name of the backend to use: the one asked for, else ``OCNN_FUSED_BACKEND``, else the first that serves."""
    if name is None and DEFAULT is not None:
        if DEFAULT not in MODULES:
            raise ValueError(f"OCNN_FUSED_BACKEND must be one of {', '.join(map(repr, MODULES))}, got {DEFAULT!r}")
        name = DEFAULT
    if name is not None:
        reason = MODULES[name].unavailable_reason(device)
        if reason is not None:
            raise RuntimeError(f"backend {name!r} is not available: {reason}")
        return name
    reasons: dict[str, str] = {}
    for candidate, module in MODULES.items():
        if _ONLY_ON_REQUEST.get(candidate) == device.type:
            continue
        reason = module.unavailable_reason(device)
        if reason is None:
            _warn_if_slower(candidate, device, reasons)
            return candidate
        reasons[candidate] = reason
    raise RuntimeError(f"no backend serves {device}: {reasons}")


def _warn_if_slower(chosen: str, device: torch.device, reasons: dict[str, str]) -> None:
    """Say once per kind of device why no compiled backend serves it."""
    if chosen != "torch" or device.type in _warned:
        return
    _warned.add(device.type)
    own = ("cpu",) if device.type == "cpu" else ("triton", "cuda")
    relevant = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if name in own)
    message = f"No compiled backend for {device.type}; falling back to PyTorch operations, which are slower: {relevant}"
    warn(message, RuntimeWarning)
