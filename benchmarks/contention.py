"""What a busy neighbour costs: quiet and disturbed rounds alternate, fused call and reference take turns in each.

    python benchmarks/contention.py            64x64x3x3 and the regulariser of ResNet-18, about two minutes
    python benchmarks/contention.py --quick    fewer rounds

A neighbour is a process that does nothing but count, such as a worker of a data loader that has much to do. There is
one for every two cores, and all of them sleep during the quiet rounds. A sample is the mean of the calls of 25 ms, so
that a wait which only some calls meet counts; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import sleep

from report import machine
from shapes import Layer
from steps import Implementation, Settings, WrongResultError, check_step, make_weights, run_step
from timing import CpuTimer, Effort, Samples, interleave
from training_overhead import IN_LOSS, REFERENCE, Training
from training_overhead import Case as Network

#: Seconds that the scheduler has to get used to neighbours that come or go.
SETTLING = 0.05
#: The reference under the same disturbance should take at least this many times as long.
AHEAD = 6.0
QUIET, DISTURBED = False, True


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


class Neighbours:
    """Busy processes, which sleep unless they are told to disturb."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._disturbing = True
        self.disturb(False)

    @staticmethod
    @contextmanager
    def beside_us(count: int) -> Iterator[Neighbours]:
        processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        try:
            yield Neighbours(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def disturb(self, disturbing: bool) -> None:
        if disturbing == self._disturbing:
            return
        for process in self.processes:
            process.send_signal(signal.SIGCONT if disturbing else signal.SIGSTOP)
        self._disturbing = disturbing
        sleep(SETTLING)


@dataclass(frozen=True)
class Limits:
    """``slower``: how many times as long a disturbed call may take as a quiet one."""

    slower: float
    ahead: float = AHEAD


@dataclass(frozen=True)
class Case:
    name: str
    limits: Limits
    calls: dict[Implementation, Callable[[], object]]


def layer_case() -> Case:
    layer = Layer("square", (64, 64, 3, 3))
    weights = make_weights([layer], Settings())
    check_step(weights, [layer], gradient=True)
    calls: dict[Implementation, Callable[[], object]] = {
        "reference": partial(run_step, "reference", weights, [layer], True),
        "fused": partial(run_step, "fused", weights, [layer], True),
    }
    return Case(layer.label, Limits(4.0), calls)


def network_case() -> Case:
    training = Training(Network("ResNet-18", (2, 2, 2, 2), cifar=False, batch=1, wanted_batch=1))
    training.check()
    calls: dict[Implementation, Callable[[], object]] = {
        "reference": partial(training.alone, REFERENCE),
        "fused": partial(training.alone, IN_LOSS),
    }
    return Case("ResNet-18 reg()", Limits(2.5), calls)


@dataclass(frozen=True)
class Result:
    case: Case
    samples: dict[tuple[Implementation, bool], Samples]  # by side, and whether it was disturbed

    def slower(self, implementation: Implementation) -> float:
        """How many times as long a disturbed call takes as a quiet one."""
        return self.samples[implementation, DISTURBED].median / self.samples[implementation, QUIET].median

    def ahead(self, disturbed: bool) -> float:
        """How many times as long the reference takes as the fused call."""
        return self.samples["reference", disturbed].median / self.samples["fused", disturbed].median

    def verdicts(self) -> list[tuple[bool, str]]:
        """What should hold: whether it does, and in words."""
        limits, slower, ahead = self.case.limits, self.slower("fused"), self.ahead(DISTURBED)
        return [
            (
                slower <= limits.slower,
                f"{self.case.name}: {slower:.2f}x its quiet time when disturbed, at most {limits.slower:g}x",
            ),
            (
                ahead >= limits.ahead,
                f"{self.case.name}: {ahead:.1f}x faster than the disturbed reference, at least {limits.ahead:g}x",
            ),
        ]


@dataclass(frozen=True)
class Turn:
    """A call that is timed with or without neighbours."""

    call: Callable[[], object]
    disturbed: bool

    def __call__(self) -> object:
        return self.call()


class NeighbourTimer(CpuTimer):
    """Before it times a turn, the neighbours wake or go to sleep."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        self._neighbours.disturb(isinstance(function, Turn) and function.disturbed)
        return super().__call__(function, calls)


def measure(case: Case, neighbours: Neighbours, rounds: int) -> Result:
    turns = {
        (implementation, disturbed): Turn(call, disturbed)
        for disturbed in (QUIET, DISTURBED)
        for implementation, call in case.calls.items()
    }
    return Result(case, interleave(turns, NeighbourTimer(neighbours), Effort.exactly(rounds)))


def table(results: Sequence[Result]) -> str:
    """Markdown: medians in ms."""
    lines = [
        "| case | side | quiet ms | disturbed ms | disturbed / quiet | ahead, quiet | ahead, disturbed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        for implementation in result.case.calls:
            quiet, disturbed = (result.samples[implementation, state].median * 1e3 for state in (QUIET, DISTURBED))
            ahead = [f"{result.ahead(state):.1f}x" if implementation == "fused" else "" for state in (QUIET, DISTURBED)]
            slower = result.slower(implementation)
            cells = [result.case.name, implementation, f"{quiet:.3f}", f"{disturbed:.3f}", f"{slower:.2f}x", *ahead]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=cores(), help="threads of torch (default: the cores there are)")
    parser.add_argument("--neighbours", type=int, default=max(1, cores() // 2), help="(default: half of the cores)")
    parser.add_argument("--rounds", type=int, default=21, help="quiet and as many disturbed ones (default: 21)")
    parser.add_argument("--quick", action="store_true", help="five rounds")
    options = parser.parse_args(arguments)
    if options.neighbours < 1 or options.rounds < 1 or options.threads < 1:
        parser.error("--threads, --neighbours and --rounds must be at least 1")
    options.rounds = 5 if options.quick else options.rounds
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    settings = Settings(threads=options.threads)
    settings.apply()
    print(", ".join(f"{key}: {value}" for key, value in machine(settings).items()), end=", ")
    print(f"busy neighbours: {options.neighbours} on {cores()} cores", flush=True)
    try:
        cases = [layer_case(), network_case()]
    except WrongResultError as error:
        raise SystemExit(f"error: {error}") from error
    with Neighbours.beside_us(options.neighbours) as neighbours:
        results = [measure(case, neighbours, options.rounds) for case in cases]
    print(f"\n{table(results)}\n")
    for result in results:
        for met, words in result.verdicts():
            print(f"{'met   ' if met else 'missed'} {words}")


if __name__ == "__main__":
    main()
