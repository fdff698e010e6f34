"""Runs configurations: resumable, with a line for each that is finished.

A run's state (networks, optimisers, random numbers, count) is saved every minute and when it is told to stop; one that
is continued gives the same bits as one that was never interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .config import Config, Line

#: Seconds between two checkpoints.
SAVE_EVERY = 60.0
RESULTS = Path(__file__).resolve().parent / "results"


class Stopped(Exception):
    """Told to stop; the checkpoint is written."""


class Task(ABC):
    """One run, cut into ``units`` between which it can be stopped. Randomness comes from torch's global generator."""

    units: int

    @abstractmethod
    def advance(self, unit: int) -> None:
        """Do one unit, counted from 0."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that changes while the run goes on, as ``torch.load(weights_only=True)`` can read it."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Plain numbers and lists, the same at every repetition."""

    def timing(self) -> dict[str, Any]:
        """What depends on the machine."""
        return {}

    def keeps(self) -> dict[str, Tensor] | None:
        """Tensors that other experiments need."""
        return None


@dataclass
class Context:
    """Where things are: the data, checkpoints and caches outside of git, and the lines."""

    data: Path
    work: Path
    results: Path = RESULTS
    stop: Callable[[], bool] = field(default=lambda: False)
    progress: bool = True

    def kept(self, config: Config) -> dict[str, Tensor]:
        """What a finished run has kept."""
        return torch.load(self.work / f"{config.key}.kept.pt", weights_only=True)

    def cached(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``make`` returned when it was first called with this name for this data."""
        data = hashlib.sha256(str(self.data.resolve()).encode()).hexdigest()[:8]
        path = self.work / f"{name}-{data}.cache.pt"
        if not path.exists():
            _save(make(), path)
        return torch.load(path, weights_only=True)

    def lines(self, experiment: str) -> dict[str, Line]:
        """The finished runs of an experiment, by key."""
        path = self.results / f"{experiment}.jsonl"
        if not path.exists():
            return {}
        lines = [Line(**json.loads(text)) for text in path.read_text().splitlines()]
        return {line.key: line for line in lines}

    def append(self, line: Line) -> None:
        self.results.mkdir(parents=True, exist_ok=True)
        with (self.results / f"{line.experiment}.jsonl").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(asdict(line)) + "\n")


@dataclass(frozen=True)
class Experiment:
    """One kind of run: its configuration, what starts it, and which other runs it takes networks from."""

    config: type[Config]
    start: Callable[[Any, Context], Task]
    needs: Callable[[Any], Sequence[Config]] = lambda config: ()


def _save(value: dict[str, Any], path: Path) -> None:
    """All or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    torch.save(value, partial)
    partial.replace(path)


@contextmanager
def claimed(context: Context, config: Config, wait: bool = False) -> Iterator[bool]:
    """Whether no other process works on this run, after waiting for it if asked to; ours until the end of the block."""
    context.work.mkdir(parents=True, exist_ok=True)
    with (context.work / f"{config.key}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def run(config: Config, context: Context, experiments: dict[str, Experiment], note: str = "") -> Line:
    """Run to the end, from the last checkpoint if there is one, and append the line if there is none yet."""
    _commit()
    experiment = experiments[config.experiment]
    for needed in experiment.needs(config):
        with claimed(context, needed, wait=True):
            if not (context.work / f"{needed.key}.kept.pt").exists():
                run(needed, context, experiments, f"{note} needs")
    torch.manual_seed(config.seed)
    task = experiment.start(config, context)
    checkpoint = context.work / f"{config.key}.pt"
    done, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        task.load(state["task"])
        torch.set_rng_state(state["random"])
        done, spent = state["done"], state["spent"]
    began, saved = process_time() - spent, monotonic()

    def save() -> None:
        _save({"task": task.state(), "random": torch.get_rng_state(), "done": done, "spent": process_time() - began},
              checkpoint)  # fmt: skip

    title = " ".join([note, config.experiment, *(f"{name}={value}" for name, value in config.changed.items())])
    with tqdm(total=task.units, initial=done, desc=title.strip(), disable=not context.progress, mininterval=5) as bar:
        while done < task.units:
            if context.stop():
                save()
                raise Stopped(config.key)
            task.advance(done)
            done += 1
            bar.update()
            if monotonic() - saved > SAVE_EVERY:
                save()
                saved = monotonic()
    line = Line(
        config.experiment, config.key, asdict(config), task.result(),
        {"processor_seconds": round(process_time() - began, 2), **task.timing()},
        torch.__version__, config.command, _commit(),
    )  # fmt: skip
    kept = task.keeps()
    if kept is not None:
        _save(kept, context.work / f"{config.key}.kept.pt")
    before = context.lines(config.experiment).get(config.key)
    if before is None:
        context.append(line)
    else:
        verdict = "the same result as" if before.result == line.result else "ANOTHER RESULT than"
        print(f"{config.command}\n    gave {verdict} its line in {config.experiment}.jsonl", flush=True)
    checkpoint.unlink(missing_ok=True)
    return line


@cache
def _commit() -> str:
    """Of the sources when the process began, or nothing outside a clone."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


class StopSignal:
    """True once SIGTERM or SIGINT came, or the file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked or self.file.exists()
