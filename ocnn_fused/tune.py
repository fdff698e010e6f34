"""Search for kernel configurations, when asked to: nothing here runs during ordinary training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .backends.triton.config import Config
    from .functional import IntOrTuple
    from .plan import Plan

#: What is tried, beside the shipped configurations: (block, depth, warps, stages).
CANDIDATES: tuple[tuple[int, int, int, int], ...] = (
    (64, 16, 4, 3),
    (64, 32, 4, 2),
    (64, 32, 4, 3),
    (64, 32, 4, 4),
    (128, 32, 8, 2),
    (128, 32, 8, 3),
    (128, 32, 8, 4),
)

_found: dict[str, dict[str, int]] | None = None


def cache_path() -> Path:
    """Where results are kept; ``OCNN_FUSED_CACHE`` names another directory."""
    default = Path.home() / ".cache" / "ocnn_fused"
    return Path(os.environ.get("OCNN_FUSED_CACHE", default)) / "tuned.json"


def _load() -> dict[str, dict[str, int]]:
    global _found
    if _found is None:
        try:
            _found = json.loads(cache_path().read_text())
        except (OSError, ValueError):
            _found = {}
    return _found


@lru_cache(maxsize=256)
def _key(device: torch.device, precision: str, plans: tuple[Plan, ...]) -> str:
    """By the device's own name: relatives that share a model of their rates do not share measurements."""
    from .backends.triton.model import device_name

    return f"{device_name(device)}|{precision}|" + ";".join(sorted({repr(plan) for plan in plans}))


def tuned_config(device: torch.device, precision: str, plans: Sequence[Plan]) -> Config | None:
    """What an earlier :func:`tune` found for these layers on this device, or None."""
    from .backends.triton.config import Config

    found = _load()
    if not found:
        return None
    entry = found.get(_key(device, precision, tuple(plans)))
    return Config(**entry) if entry else None


def candidates(shipped: Sequence[Config]) -> Iterator[Config]:
    """The explicit list: shipped configurations first, then the others."""
    from .backends.triton.config import Config

    yield from shipped
    for block, depth, warps, stages in CANDIDATES:
        config = Config(block=block, depth=depth, warps=warps, stages=stages)
        if config not in shipped:
            yield config


def tune(
    weights: Sequence[Tensor],
    strides: IntOrTuple | Sequence[IntOrTuple] = 1,
    *,
    dilations: IntOrTuple | Sequence[IntOrTuple] = 1,
    groups: int | Sequence[int] = 1,
    paddings: IntOrTuple | Sequence[IntOrTuple | None] | None = None,
    precision: str | None = None,
    measure: Callable[[Callable[[], object]], float] | None = None,
    report: Callable[[str], None] = print,
) -> Config:
    """Measure every candidate on these weights, report each, and remember the fastest for this device on disk.

    Weights and their geometry are given as to :func:`ocnn_fused.fused_orth_loss_foreach`. ``measure`` times a call in
    seconds; by default CUDA events around ten calls after a warm-up. A candidate that does not compile or does not fit
    is reported and skipped.
    """
    from .backends import triton as backend
    from .backends.triton.config import resolve_precision
    from .backends.triton.model import choose_plan, spec_of
    from .functional import _one_each, geometry_of
    from .ops import plans_for

    weights = [weight.detach() for weight in weights]
    device, count = weights[0].device, len(weights)
    reason = backend.unavailable_reason(device)
    if reason is not None:
        raise RuntimeError(f"there is nothing to tune: {reason}")
    geometry = geometry_of(
        weights,
        _one_each("strides", strides, count),
        _one_each("dilations", dilations, count),
        _one_each("groups", groups, count),
        _one_each("paddings", paddings, count),
    )
    plans = plans_for([weight.shape for weight in weights], *geometry[:4], "auto", backend)
    spec = spec_of(device)
    chosen = spec.native_precision(resolve_precision(precision))
    measure = measure or partial(_cuda_seconds, device)
    best: tuple[float, Config] | None = None
    for config in candidates(spec.shipped[chosen]):
        try:
            step = partial(
                backend.run, weights, plans, [True] * count, precision=chosen, launch="staged", config=config
            )
            seconds = measure(step)
        except Exception as error:  # one candidate's failure must not end the search
            report(f"{config}: {type(error).__name__}: {str(error)[:80]}")
            continue
        report(f"{config}: {seconds * 1e6:.1f} us")
        if best is None or seconds < best[0]:
            best = seconds, config
    if best is None:
        raise RuntimeError("no candidate configuration could be run")
    of_call = zip(weights, plans, strict=True)
    launched = tuple(choose_plan(plan, spec, chosen, weight.dtype) for weight, plan in of_call)
    _remember(_key(device, chosen, launched), best[1])
    return best[1]


def _remember(key: str, config: Config) -> None:
    _load()[key] = asdict(config)
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(_load(), indent=1))
    temporary.replace(path)  # never a half-written file


def _cuda_seconds(device: torch.device, call: Callable[[], object], repeats: int = 10) -> float:
    call()
    with torch.cuda.device(device):  # an event belongs to the stream of the current device
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats
