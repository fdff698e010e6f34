"""Search for kernel configurations, when asked to: nothing here runs during ordinary training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .backends.triton.config import Config
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


def _key(device: str, precision: str, plans: Sequence[Plan]) -> str:
    return f"{device}|{precision}|" + ";".join(sorted({repr(plan) for plan in plans}))


def tuned_config(device: str, precision: str, plans: Sequence[Plan]) -> Config | None:
    """What an earlier :func:`tune` found for these layers on this device, or None."""
    from .backends.triton.config import Config

    found = _load()
    if not found:
        return None
    entry = found.get(_key(device, precision, plans))
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
    strides: Sequence[int] | int = 1,
    *,
    groups: Sequence[int] | int = 1,
    precision: str | None = None,
    measure: Callable[[Callable[[], object]], float] | None = None,
    report: Callable[[str], None] = print,
) -> Config:
    """Measure every candidate on these weights, report each, and remember the fastest for this device on disk.

    ``measure`` times a call in seconds; by default CUDA events around ten calls after a warm-up. A candidate that does
    not compile or does not fit is reported and skipped.
    """
    from .backends import triton as backend
    from .backends.triton.config import resolve_precision
    from .backends.triton.model import choose_plan, spec_of
    from .ops import plan_for

    weights = [weight.detach() for weight in weights]
    reason = backend.unavailable_reason(weights[0].device)
    if reason is not None:
        raise RuntimeError(f"there is nothing to tune: {reason}")
    all_strides = [strides] * len(weights) if isinstance(strides, int) else list(strides)
    all_groups = [groups] * len(weights) if isinstance(groups, int) else list(groups)
    plans = [
        plan_for(w.shape, [s] * (w.dim() - 2), [1] * (w.dim() - 2), [-1] * (w.dim() - 2), g, "auto", backend)  # type: ignore[arg-type]
        for w, s, g in zip(weights, all_strides, all_groups, strict=True)
    ]
    spec = spec_of(weights[0].device)
    chosen = spec.native_precision(resolve_precision(precision))
    measure = measure or _cuda_seconds
    best: tuple[float, Config] | None = None
    for config in candidates(spec.shipped[chosen]):
        try:
            step = partial(backend.run, weights, plans, True, precision=chosen, launch="staged", config=config)
            seconds = measure(step)
        except Exception as error:  # one candidate's failure must not end the search
            report(f"{config}: {type(error).__name__}: {str(error)[:80]}")
            continue
        report(f"{config}: {seconds * 1e6:.1f} us")
        if best is None or seconds < best[0]:
            best = seconds, config
    if best is None:
        raise RuntimeError("no candidate configuration could be run")
    _remember(_key(spec.name, chosen, [choose_plan(plan, spec, chosen) for plan in plans]), best[1])
    return best[1]


def _remember(key: str, config: Config) -> None:
    _load()[key] = asdict(config)
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(_load(), indent=1))
    temporary.replace(path)  # never a half-written file


def _cuda_seconds(call: Callable[[], object], repeats: int = 10) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats
