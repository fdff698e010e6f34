"""What a benchmark leaves behind: rows that say what was measured, where, with which versions, and how undisturbed.

A command's rows are kept as ``<command>.json``, one complete record per row, and as CSV. A later run replaces the rows
of the sections that it measured and leaves the others, so that a long command can be run in pieces. One that did not
come to its end replaces the rows that it measured, and no others.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from steps import Settings

import ocnn_fused
from ocnn_fused.backends import choose

ROOT = Path(__file__).resolve().parents[1]
#: Where a run leaves its results unless told otherwise, and where the ones that docs/benchmarks.md shows are kept.
OUT, KEPT = ROOT / "build" / "benchmarks", ROOT / "benchmarks" / "results"

SECONDS, BYTES, RELATIVE, COUNT = "s", "B", "relative", "count"


@dataclass(frozen=True)
class Environment:
    """Where and with what a row was measured."""

    device: str
    hardware: str
    instructions: str  # the widest that torch's own kernels use on the CPU
    cores: int
    threads: int
    dtype: str
    precision: str
    backend: str
    python: str
    torch: str
    ocnn_fused: str
    revision: str

    @staticmethod
    def of(settings: Settings) -> Environment:
        on_cpu = settings.device == "cpu"
        return Environment(
            device=settings.device,
            hardware=_cpu_model() if on_cpu else torch.cuda.get_device_name(settings.device),
            instructions=torch.backends.cpu.get_cpu_capability(),
            cores=len(os.sched_getaffinity(0)),
            threads=settings.threads,
            dtype=settings.dtype_name,
            precision=settings.precision,
            backend=choose(torch.device(settings.device)),
            python=platform.python_version(),
            torch=torch.__version__,
            ocnn_fused=ocnn_fused.__version__,
            revision=revision(),
        )

    @property
    def machine(self) -> str:
        cores = f"{self.cores} cores of {self.hardware} ({self.instructions})"
        return cores if self.device == "cpu" else self.hardware

    def __str__(self) -> str:
        where = f"{self.machine}, {self.threads} threads"
        where = where if self.device == "cpu" else f"{self.device} ({self.hardware}, precision {self.precision})"
        return (
            f"{where}, {self.dtype}, backend {self.backend}; torch {self.torch}, Python {self.python}, "
            f"ocnn_fused {self.ocnn_fused} at {self.revision}"
        )


@cache
def revision() -> str:
    """The commit of the sources, with a + if what is measured or what measures was changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "ocnn_fused", "csrc", "setup.py", ":(glob)benchmarks/*.py")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Row:
    """One contender at one subject: the spread of its samples, and everything needed to read them."""

    command: str
    section: str  # what is replaced together: a network, an axis
    subject: str  # a layer, a network, a size
    contender: str
    measure: str  # "loss and gradient", "peak memory", ...
    unit: str
    p20: float
    p50: float
    p80: float
    minimum: float
    rounds: int
    disturbance: float | None  # share of the machine that others used meanwhile; None where it does not matter
    environment: Environment
    details: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(samples: Sequence[float], **known: Any) -> Row:
        p20, p50, p80 = (float(value) for value in np.percentile(samples, (20, 50, 80)))
        return Row(p20=p20, p50=p50, p80=p80, minimum=float(min(samples)), rounds=len(samples), **known)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from the other rows of a file."""
        where = self.environment
        return self.section, self.subject, self.contender, self.measure, where.device, where.dtype, where.threads


def save(folder: Path, command: str, rows: Iterable[Row], complete: bool = True) -> Path:
    """Keep the rows beside those of other sections, or beside all others if not complete; returns where the JSON is."""
    folder.mkdir(parents=True, exist_ok=True)
    path, new = folder / f"{command}.json", list(rows)
    sections, keys = {row.section for row in new}, {row.key for row in new}
    every = [row for row in load(folder, command) if not (row.section in sections if complete else row.key in keys)]
    every += new
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in every) + "\n]\n")
    with path.with_suffix(".csv").open("w", newline="") as file:
        flat = [{**asdict(row), **asdict(row.environment)} for row in every]
        writer = csv.DictWriter(file, [name for name in flat[0] if name != "environment"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(flat)
    return path


def load(folder: Path, command: str) -> list[Row]:
    """The kept rows of a command; none if it was never run."""
    path = folder / f"{command}.json"
    if not path.exists():
        return []
    read = [Row(**one) for one in json.loads(path.read_text())]
    return [replace(row, environment=Environment(**row.environment)) for row in read]  # type: ignore[arg-type]


class Rows:
    """Rows to look values up in."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.every = list(rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.every)

    def __len__(self) -> int:
        return len(self.every)

    def where(self, **wanted: object) -> Rows:
        """Those whose fields are as given."""
        return Rows(row for row in self.every if all(getattr(row, name) == value for name, value in wanted.items()))

    def names(self, field_name: str) -> list[Any]:
        """Distinct values of a field, in order."""
        return list(dict.fromkeys(getattr(row, field_name) for row in self.every))

    def by(self, field_name: str) -> Iterator[tuple[Any, Rows]]:
        """Each of these with its rows."""
        return ((name, self.where(**{field_name: name})) for name in self.names(field_name))

    def get(self, **wanted: object) -> Row | None:
        """The one row, or None."""
        return next(iter(self.where(**wanted)), None)

    def need(self, **wanted: object) -> Row:
        """The same where there must be one."""
        return next(iter(self.where(**wanted)))

    def median(self, **wanted: object) -> float | None:
        row = self.get(**wanted)
        return None if row is None else row.p50
