"""How the regulariser's weight changes over training: callables from the step number to a factor of the weight.

Each is a small dataclass with ``state_dict`` and ``load_state_dict``. Any other callable of the step serves too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import cos, pi
from typing import Any

__all__ = ["Constant", "Cosine", "Schedule", "Step", "Warmup"]


class Schedule:
    """Base class: ``schedule(step)`` is the factor at optimiser step ``step`` (from 0)."""

    def __call__(self, step: int) -> float:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The schedule's settings, as plain numbers."""
        return asdict(self)  # type: ignore[call-overload]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the settings of a saved schedule of the same kind."""
        expected = self.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(f"state of {type(self).__name__} must have the keys {[*expected]}, got {[*state]}")
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Constant(Schedule):
    """``factor``, always."""

    factor: float = 1.0

    def __call__(self, step: int) -> float:
        return self.factor


@dataclass
class Warmup(Schedule):
    """From ``start`` in a straight line to 1 at step ``steps``, then 1.

    ``factor(t) = start + (1 - start) * min(1, t / steps)``
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        return self.start + (1.0 - self.start) * min(1.0, step / self.steps)


@dataclass
class Cosine(Schedule):
    """From 1 (after ``warmup`` steps of a straight line from 0) down half a cosine to ``end`` at step ``steps``.

    ``factor(t) = end + (1 - end) * (1 + cos(pi * (t - warmup) / (steps - warmup))) / 2``
    """

    steps: int
    end: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_positive("steps", self.steps)
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must be at least 0 and below steps = {self.steps}, got {self.warmup}")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        progress = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.end + (1.0 - self.end) * (1.0 + cos(pi * progress)) / 2


@dataclass
class Step(Schedule):
    """Multiplied by ``gamma`` every ``steps`` steps: ``factor(t) = gamma ** (t // steps)``."""

    steps: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("steps", self.steps)

    def __call__(self, step: int) -> float:
        return self.gamma ** (step // self.steps)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be positive, got {value}")
