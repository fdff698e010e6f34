"""Search for kernel configurations, when asked to: nothing here runs during ordinary training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...plan import Plan
from ...problem import Precision
from .. import triton as backend
from ..device import spec_of
from .config import Config, shipped
from .tuned import remember

#: What is tried, beside the shipped configurations.
CANDIDATES = (
    Config(tile=64, depth=16, warps=4, stages=3),
    *(Config(tile=64, depth=32, warps=4, stages=stages) for stages in (2, 3, 4)),
    *(Config(tile=128, depth=32, warps=8, stages=stages) for stages in (2, 3, 4)),
)


def search(
    weights: Sequence[Tensor],
    plans: Sequence[Plan],
    precision: Precision,
    measure: Callable[[Callable[[], object]], float] | None,
    report: Callable[[str], None],
) -> Config:
    """Measure every candidate on these weights, report each, and remember the fastest for this device on disk."""
    device = weights[0].device
    step = partial(backend.run, weights, plans, [True] * len(plans), precision=precision, launch="staged")
    every = candidates(shipped(spec_of(device))[precision])
    best = fastest(every, step, measure or partial(_cuda_seconds, device), report)
    remember(device, precision, plans, best)
    return best


def candidates(shipped: Sequence[Config]) -> Iterator[Config]:
    """The explicit list: shipped configurations first, then the others."""
    yield from shipped
    yield from (config for config in CANDIDATES if config not in shipped)


def fastest(
    configs: Iterable[Config],
    step: Callable[..., object],
    measure: Callable[[Callable[[], object]], float],
    report: Callable[[str], None],
) -> Config:
    """The configuration with which ``step`` takes least time; what fails is reported, and so is every time."""
    times: dict[Config, float] = {}
    for config in configs:
        try:
            times[config] = measure(partial(step, config=config))
        except Exception as error:  # one candidate's failure must not end the search
            report(f"{config}: {type(error).__name__}: {str(error)[:80]}")
        else:
            report(f"{config}: {times[config] * 1e6:.1f} us")
    if not times:
        raise RuntimeError("no candidate configuration could be run")
    return min(times, key=times.__getitem__)


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
