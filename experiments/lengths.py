"""Lambda at each length of training: fixed ones of a grid, steered ones, and none; the plan of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from .classification import Classification, ClassificationTask
from .methods import Method
from .runner import Experiment
from .training import update

SEEDS = (0, 1, 2)
RATE = 0.1  # of all methods: what the trials of 300 steps chose for each of them
#: Lambdas, the projection's rates, and tolerances; what is first is run with all seeds before the rest.
GRIDS: dict[Method, tuple[float, ...]] = {
    "plain": (0.0,),
    "ocnn": (0.0001, 0.0003, 0.001, 0.003, 0.01),
    "ocnn-auto": (1.0,),
    "kernel": (0.1, 0.01),
    "srip": (1.0, 0.1),
    "kernel-auto": (1.0,),
    "ocnn-free": (0.001, 0.01),
    "projection": (0.001, 0.01),
}
#: The default of OrthRegularizer.
TOLERANCE = GRIDS["ocnn-auto"][0]
#: Others, with one seed, to see how much it matters.
OTHER_TOLERANCES = (0.3, 0.5, 2.0)
FIRST: tuple[Method, ...] = ("plain", "ocnn", "ocnn-auto")
SECOND: tuple[Method, ...] = ("kernel", "srip", "kernel-auto")
THIRD: tuple[Method, ...] = ("ocnn-free", "projection")


@dataclass(frozen=True)
class TaskClipped(Classification):
    """The norm of the task's gradient alone is cut to 5; the penalty's is added to it as it is."""

    experiment: ClassVar[str] = "task-clipped"


class TaskClippedTask(ClassificationTask):
    def update(self, loss: Tensor) -> None:
        update(loss, self.model, self.optimizer, self.regularization, clips_all=False)


TASK_CLIPPED = Experiment(TaskClipped, TaskClippedTask)


@dataclass(frozen=True)
class Cell:
    """One network, data and length; ``config`` is without method, weight and seed."""

    config: Classification

    @property
    def title(self) -> str:
        config = self.config
        clipped = ", task's gradient clipped alone" if isinstance(config, TaskClipped) else ""
        return f"width {config.width}, {config.fraction:.0%} of the labels, {config.steps} steps{clipped}"

    def runs(self, methods: Sequence[Method], seed: int) -> list[Classification]:
        return [
            replace(self.config, method=method, weight=weight, seed=seed)
            for method in methods
            for weight in GRIDS[method]
        ]

    def sweep(self, seed: int) -> list[Classification]:
        """Other tolerances."""
        return [replace(self.config, method="ocnn-auto", weight=one, seed=seed) for one in OTHER_TOLERANCES]


def _cells(width: int, fraction: float, kind: type[Classification] = Classification) -> list[Cell]:
    """The lengths, the two that decide most first."""
    return [Cell(kind(rate=RATE, width=width, fraction=fraction, steps=steps)) for steps in (6000, 1200, 600)]


CELLS = [
    *_cells(8, 1.0),
    *_cells(8, 0.2),
    *_cells(8, 1.0, TaskClipped),
    *_cells(16, 1.0),
    *_cells(16, 0.2),
]


def runs_of(cells: Sequence[Cell], seeds: Sequence[int]) -> Iterator[tuple[str, list[Classification]]]:
    """Titles and runs in the order of their worth: the first network at each length, then the other cells."""
    first = cells[:3]
    for methods in (FIRST, SECOND):
        for seed in seeds:
            for cell in first:
                yield cell.title, cell.runs(methods, seed)
    for cell in first:
        yield f"{cell.title}, other tolerances", cell.sweep(seeds[0])
    for methods in (FIRST, SECOND, THIRD):
        for seed in seeds:
            for cell in cells:
                yield cell.title, cell.runs(methods, seed)
