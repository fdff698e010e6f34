"""What all commands share: their options, the timing of contenders in turns, a progress bar, and the rows they keep."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from record import BYTES, OUT, SECONDS, Environment, Row, Rows, load, save
from steps import DTYPES, PRECISIONS, Settings, WrongResultError, usual_device
from tables import milliseconds
from timing import EAGER, Disturbance, Effort, interleave, make_timer
from tqdm import tqdm

#: If other processes use more than this share of the CPU, times are not to be trusted.
DISTURBED = 0.05
#: The exit code of what Ctrl-C ended.
INTERRUPTED = 128 + signal.SIGINT


def parser_of(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all commands have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = parser.add_argument_group("shared by all commands")
    shared.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    shared.add_argument("--device", default=usual_device(), help="cpu or cuda (default: cuda where there is a GPU)")
    shared.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    shared.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    shared.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="torch's float32 matmul precision (default: highest)"
    )
    shared.add_argument("--seconds", type=float, default=4.0, help="seconds to spend on each row (default: 4)")
    shared.add_argument("--repeats", type=int, help="exact number of rounds per row, instead of --seconds")
    shared.add_argument("--out", type=Path, default=OUT, help="folder of JSON, CSV and PNG (default: build/benchmarks)")
    return parser


class Harness:
    """Measures for one command and keeps what it measured."""

    def __init__(self, command: str, options: argparse.Namespace, gradient: bool = True) -> None:
        self.command = command
        self.options = options
        self.settings = Settings(options.device, DTYPES[options.dtype], options.threads, gradient, options.precision)
        self.settings.apply()
        self.timer = make_timer(options.device)
        self.rows: list[Row] = []
        self.complete = True  # whether everything was measured that was asked for
        self.interrupted = False
        self._bar: Any = None
        print(Environment.of(self.settings), flush=True)

    @property
    def effort(self) -> Effort:
        if self.options.repeats:
            return Effort.exactly(self.options.repeats)
        return Effort(0.5, min_rounds=3, limit=1.5) if self.options.quick else Effort(self.options.seconds)

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """A bar over so many subjects; whatever is measured inside moves it.

        Ctrl-C ends what is measured inside, and what comes afterwards goes on with the rows that there are.
        """
        try:
            with tqdm(total=total, unit="row", dynamic_ncols=True) as self._bar:
                yield
        except KeyboardInterrupt:
            self.interrupted, self.complete = True, False
            print(f"\nInterrupted: {len(self.rows)} rows are kept.", flush=True)
        self._bar = None

    def announce(self, what: str) -> None:
        if self._bar is not None:
            self._bar.set_description(f"{what:<28}")

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def time(
        self,
        section: str,
        subject: str,
        calls: Mapping[str, Callable[[], object]],
        measure: str,
        details: Mapping[str, Any] | None = None,
        effort: Effort | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Times the calls in turns, in all modes of the timer; each must have been called once before."""
        self.announce(subject)
        prepared = {
            (mode, name): self.timer.prepare(call, mode) for mode in self.timer.modes for name, call in calls.items()
        }
        disturbance = Disturbance()
        samples = interleave(prepared, self.timer, effort or self.effort)
        share = disturbance.share
        for (mode, name), taken in samples.items():
            place = section if mode == EAGER else f"{section}, {mode}"
            self.add(place, subject, name, measure, SECONDS, taken, share, details, settings)
        self.show(section, subject, measure, settings)
        self.advance()

    def show(self, section: str, subject: str, measure: str, settings: Settings | None = None) -> None:
        """Print what was just measured, above the bar."""
        where = Environment.of(settings or self.settings)
        rows = Rows(row for row in self.rows if row.environment == where)
        rows = rows.where(section=section, subject=subject, measure=measure)
        times = ", ".join(f"{row.contender} {milliseconds(row.p50)}" for row in rows)
        tqdm.write(f"{section} {subject}, {measure}, ms: {times}")
        sys.stdout.flush()

    def add(
        self,
        section: str,
        subject: str,
        contender: str,
        measure: str,
        unit: str,
        samples: Sequence[float],
        disturbance: float | None = None,
        details: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
    ) -> Row:
        """Keeps one row."""
        row = Row.of(
            samples,
            command=self.command,
            section=section,
            subject=subject,
            contender=contender,
            measure=measure,
            unit=unit,
            disturbance=disturbance,
            environment=Environment.of(settings or self.settings),
            details=dict(details or {}),
        )
        self.rows.append(row)
        return row

    def memory(self, section: str, subject: str, contender: str, peak: int | None, **details: Any) -> None:
        """Keeps a peak of memory, where the system could tell it."""
        if peak is not None:
            self.add(section, subject, contender, "peak memory", BYTES, [float(peak)], None, details)

    def finish(self) -> Rows:
        """Writes JSON and CSV, and returns the rows of this run together with those kept from others."""
        path = save(self.options.out, self.command, self.rows, self.complete)
        print(f"Rows: {path} and .csv")
        return Rows(load(self.options.out, self.command))

    def report(self, tables: Callable[[Rows], str], draw: Callable[[Rows, Path], Sequence[Path]]) -> None:
        """Writes all of that, prints the tables of this run, and draws everything that is kept.

        A run that was interrupted ends with the exit code that shells give to it.
        """
        if self.interrupted and not self.rows:
            raise SystemExit(INTERRUPTED)
        every = self.finish()
        print(f"\n{tables(Rows(self.rows))}")
        if note := disturbed(self.rows):
            print(f"\n{note}")
        for picture in draw(every, self.options.out):
            print(f"Picture: {picture}")
        if self.interrupted:
            raise SystemExit(INTERRUPTED)


def disturbed(rows: Iterable[Row]) -> str:
    """A sentence if others used the machine too much, else nothing."""
    every = list(rows)
    shares = [share for row in every if (share := row.disturbance or 0.0) > DISTURBED]
    if not shares:
        return ""
    return (
        f"Other processes used up to {max(shares):.0%} of the CPU during {len(shares)} of {len(every)} rows; "
        "rerun on an idle machine."
    )


def run(main: Callable[[], None]) -> None:
    """``main`` with the errors that a user can cause in one sentence, and the time it took."""
    start = perf_counter()
    warnings.filterwarnings("ignore", "no orthogonal convolution exists")  # of some layers of every ResNet
    try:
        main()
    except (WrongResultError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"Took {perf_counter() - start:.0f} s")
