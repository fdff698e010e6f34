"""Interleaved timing: all contestants take turns in one process, so that they share whatever the machine is doing."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

#: A sample repeats its call until it lasts about this long: far above the clock's and the scheduler's granularity.
SAMPLE_SECONDS = 25e-3


EAGER, GRAPH = "eager", "cuda graph"


class Timer(Protocol):
    """Times calls on one kind of device, in each of the modes in which they can be issued there."""

    modes: tuple[str, ...]

    def prepare(self, function: Callable[[], object], mode: str) -> Callable[[], object]:
        """What is called instead of ``function`` in this mode."""
        ...

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        """Seconds per call, over ``calls`` calls in a row."""
        ...


class CpuTimer:
    """Wall clock, or another one: ``time.process_time`` where processes share the cores."""

    modes: tuple[str, ...] = (EAGER,)

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock

    def prepare(self, function: Callable[[], object], mode: str) -> Callable[[], object]:
        return function

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        start = self._clock()
        for _ in range(calls):
            function()
        return (self._clock() - start) / calls


class CudaTimer:
    """Events around every call, and before each the caches are flushed: weights come from memory, as in training.

    The flush keeps the device busy while the host issues the call, so that a short call shows the device's time alone,
    and a long one also the gaps that its launches leave. ``cuda`` is torch.cuda, or something like it.
    """

    modes: tuple[str, ...] = (EAGER, GRAPH)

    def __init__(self, flush: Callable[[], object], cuda: Any = torch.cuda) -> None:
        self._flush = flush
        self._cuda = cuda

    def prepare(self, function: Callable[[], object], mode: str) -> Callable[[], object]:
        return self._captured(function) if mode == GRAPH else function

    def _captured(self, function: Callable[[], object]) -> Callable[[], object]:
        """Replays what one call launches; it is called before on another stream, where everything gets ready."""
        cuda = self._cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            function()
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            function()
        return graph.replay

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        events = []
        for _ in range(calls):
            self._flush()
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            events.append((start, end))
        self._cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) * 1e-3 / calls


def make_timer(device: str) -> Timer:
    """The timer for a device; a ValueError where there is none."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return CpuTimer()
    if kind != "cuda":
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} needs a GPU, and torch {torch.__version__} sees none")
    torch.cuda.set_device(torch.device(device).index or 0)
    scratch = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    return CudaTimer(scratch.zero_)


Name = TypeVar("Name")


@dataclass(frozen=True)
class Effort:
    """How long one interleaved measurement may take: whole rounds until ``seconds`` have passed.

    After ``limit`` seconds one round will do, whatever the machine is busy with.
    """

    seconds: float = 5.0
    min_rounds: int = 5
    max_rounds: int = 100
    limit: float = math.inf

    @staticmethod
    def exactly(rounds: int) -> Effort:
        return Effort(math.inf, rounds, rounds)


class Disturbance:
    """How much of the machine went to others (processes or a hypervisor) since this was made."""

    def __init__(self) -> None:
        self._start = self._counters()

    @staticmethod
    def _counters() -> tuple[float, float] | None:
        """Seconds of all processors spent busy by anyone but us, and their seconds in all."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, idle, waiting, *rest = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields)
        busy = user + nice + system + sum(rest)
        return busy - sum(os.times()[:4]), busy + idle + waiting

    @property
    def share(self) -> float | None:
        """0 on a quiet machine, 1 when nothing was left for us; None where the system does not tell."""
        end = self._counters()
        if self._start is None or end is None or end[1] <= self._start[1]:
            return None
        return max(0.0, (end[0] - self._start[0]) / (end[1] - self._start[1]))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _one_call(function: Callable[[], object], timer: Timer, effort: Effort) -> float:
    """Seconds of one call: the fastest of three if it is short, so that one hiccup does not spoil the sample length.

    Their mean where time is limited: beside other processes all calls may be slow, and samples as many times too long.
    """
    seconds = timer(function, 1)
    if seconds > 0.2:
        return seconds
    three = (seconds, timer(function, 1), timer(function, 1))
    return min(three) if effort.limit == math.inf else sum(three) / 3


def turns(names: Sequence[Name], done: int) -> Sequence[Name]:
    """All names, beginning with another one in each round."""
    first = done % len(names)
    return [*names[first:], *names[:first]]


def interleave(
    contestants: Mapping[Name, Callable[[], object]], timer: Timer, effort: Effort
) -> dict[Name, list[float]]:
    """Seconds per call of every contestant, one value per round; each round times all of them once.

    The contestants must have been called once before, so that nothing is allocated or compiled here.
    """
    names = list(contestants)
    samples: dict[Name, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        start = perf_counter()
        single = {name: _one_call(contestants[name], timer, effort) for name in names}
        calls = {name: math.ceil(SAMPLE_SECONDS / seconds) for name, seconds in single.items()}
        counted = max(calls.values()) == 1  # then the calls that told us so are a whole round
        if counted:
            for name, seconds in single.items():
                samples[name].append(seconds)
        for done in range(int(counted), effort.max_rounds):
            spent = perf_counter() - start
            if spent >= effort.seconds and (done >= effort.min_rounds or (done and spent >= effort.limit)):
                break
            for name in turns(names, done):
                samples[name].append(timer(contestants[name], calls[name]))
    return samples
