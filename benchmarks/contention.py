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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import sleep

import figures
from compare import BOTH
from contenders import FUSED, REFERENCE, calls_of
from harness import Harness, parser_of, run
from record import Rows
from shapes import Layer
from steps import Settings, make_weights
from tables import milliseconds, ratio, table, times, verdict
from timing import CpuTimer, Effort
from training_overhead import CASES, IN_LOSS, Training

COMMAND = "contention"
#: Seconds that the scheduler has to get used to neighbours that come or go.
SETTLING = 0.05
#: The reference under the same disturbance should take at least this many times as long.
AHEAD = 6.0
QUIET, DISTURBED = "quiet", "disturbed"


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


#: How many times as long a disturbed call may take as a quiet one.
LAYER, NETWORK = "64x64x3x3", "ResNet-18 reg()"
SLOWER = {LAYER: 4.0, NETWORK: 2.5}

Calls = dict[str, Callable[[], object]]


def layer_calls(settings: Settings) -> Calls:
    layer = Layer("square", (64, 64, 3, 3))
    return dict(calls_of((REFERENCE, FUSED), make_weights([layer], settings), [layer], settings))


def network_calls() -> Calls:
    training = Training(replace(CASES["resnet18"], cifar=False, batch=1))
    training.check()
    calls = {REFERENCE: partial(training.alone, REFERENCE), FUSED: partial(training.alone, IN_LOSS)}
    for call in calls.values():
        call()
    return calls  # type: ignore[return-value]


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
        super().__init__()
        self._neighbours = neighbours

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        self._neighbours.disturb(isinstance(function, Turn) and function.disturbed)
        return super().__call__(function, calls)


def measure(harness: Harness, name: str, calls: Calls, rounds: int) -> None:
    turns = {
        f"{contender}, {state}": Turn(call, state == DISTURBED)
        for state in (QUIET, DISTURBED)
        for contender, call in calls.items()
    }
    harness.time(name, name, turns, BOTH, effort=Effort.exactly(rounds))


def slower(rows: Rows, name: str, contender: str = FUSED) -> float | None:
    """How many times as long a disturbed call takes as a quiet one."""
    own = rows.where(section=name)
    return ratio(own.median(contender=f"{contender}, {DISTURBED}"), own.median(contender=f"{contender}, {QUIET}"))


def ahead(rows: Rows, name: str, state: str) -> float | None:
    """How many times as long the reference takes as the fused call."""
    own = rows.where(section=name)
    return ratio(own.median(contender=f"{REFERENCE}, {state}"), own.median(contender=f"{FUSED}, {state}"))


def tables(rows: Rows) -> str:
    body = []
    for name, own in rows.by("section"):
        for contender in (REFERENCE, FUSED):
            cells = {"case": name, "by": contender}
            for state in (QUIET, DISTURBED):
                cells[f"{state} ms"] = milliseconds(own.median(contender=f"{contender}, {state}"))
            cells["disturbed / quiet"] = times(slower(rows, name, contender))
            if contender == FUSED:
                leads = {state: ahead(rows, name, state) for state in (QUIET, DISTURBED)}
                cells |= {f"ahead, {state}": times(lead) for state, lead in leads.items()}
                enough = verdict(slower(rows, name), SLOWER[name], at_most=True)
                cells["target"] = f"{enough}, ahead {verdict(leads[DISTURBED], AHEAD)}"
            body.append(cells)
    return table(body, ("by", "target"))


def draw(rows: Rows, folder: Path) -> list[Path]:
    names = rows.names("section")
    series = {contender: [slower(rows, name, contender) for name in names] for contender in (REFERENCE, FUSED)}
    title, path = "A busy neighbour for every two cores", folder / "contention.png"
    return [figures.bars(path, title, names, series, "times as long as without", rows.every[0].environment)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.set_defaults(threads=cores(), device="cpu")
    parser.add_argument("--neighbours", type=int, default=max(1, cores() // 2), help="(default: half of the cores)")
    parser.add_argument("--rounds", type=int, default=21, help="quiet and as many disturbed ones (default: 21)")
    options = parser.parse_args(arguments)
    if options.neighbours < 1 or options.rounds < 1 or options.threads < 1:
        parser.error("--threads, --neighbours and --rounds must be at least 1")
    options.rounds = options.repeats or (5 if options.quick else options.rounds)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    harness = Harness(COMMAND, options)
    print(f"busy neighbours: {options.neighbours} on {cores()} cores", flush=True)
    with harness.progress(2), Neighbours.beside_us(options.neighbours) as neighbours:
        harness.timer = NeighbourTimer(neighbours)
        measure(harness, LAYER, layer_calls(harness.settings), options.rounds)
        measure(harness, NETWORK, network_calls(), options.rounds)
    harness.rows = [replace(row, disturbance=None) for row in harness.rows]  # ours, not others'
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
