"""Odd polynomials that move singular values towards 1: one triple ``(a, b, c)`` per step, ``a s + b s^3 + c s^5``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from math import isfinite
from typing import Literal

from ..problem import check_choice

Step = tuple[float, float, float]
Coefficients = Literal["minimax", "muon"] | Sequence[Sequence[float]]

#: Singular values that are meant to become 1, where the largest is 1; smaller ones grow, but do not get there.
LOWER = 0.01

#: Of ``torch.optim.Muon``, at every step.
MUON: Step = (3.4445, -4.775, 2.0315)


@lru_cache(maxsize=64)
def minimax(steps: int, lower: float = LOWER, upper: float = 1.0) -> tuple[Step, ...]:
    """Cubic steps, each the best for the interval that the one before has left: the largest ``|p(s) - 1|`` is least.

    With ``r = l^2 + l u + u^2`` the cubic takes the same value at both ends of ``[l, u]``, and lies as far above 1 at
    its maximum as it lies below 1 there.
    """
    found = []
    for _ in range(steps):
        r = lower**2 + lower * upper + upper**2
        b = 2 / (lower * (r - lower**2) + 2 * (r / 3) ** 1.5)
        found.append((b * r, -b, 0.0))
        lower, upper = b * lower * (r - lower**2), 2 * b * (r / 3) ** 1.5
    return tuple(found)


def steps_of(coefficients: Coefficients, steps: int) -> tuple[Step, ...]:
    """The steps by name, or as given: (a, b) or (a, b, c) each, the last repeated where there are fewer than steps."""
    if isinstance(coefficients, str):
        check_choice("coefficients", coefficients, ("minimax", "muon"), "a sequence of (a, b, c) or one of")
        return minimax(steps) if coefficients == "minimax" else (MUON,) * steps
    try:
        given = [tuple(map(float, step)) for step in coefficients]
    except (TypeError, ValueError):
        given = []
    if not given or not all(len(step) in (2, 3) and all(map(isfinite, step)) for step in given):
        raise ValueError(
            "coefficients must be 'minimax', 'muon' or a sequence of (a, b) or (a, b, c), each finite, "
            f"got {coefficients!r}"
        )
    padded = [(*step, 0.0) if len(step) == 2 else step for step in given]
    return tuple(step for step, _ in zip(chain(padded, repeat(padded[-1])), range(steps), strict=False))  # type: ignore[misc]


def largest(steps: Sequence[Step], upper: float = 1.0) -> float:
    """The largest value that singular values of at most ``upper`` can have after the steps, as matrices."""
    for a, b, c in steps:
        ends = [upper, *(s for s in _extrema(a, b, c) if s < upper)]
        upper = max(abs(s * (a + s**2 * (b + s**2 * c))) for s in ends)
    return upper


def _extrema(a: float, b: float, c: float) -> list[float]:
    """Positive zeros of the derivative ``a + 3 b s^2 + 5 c s^4``."""
    if c == 0:
        squares = [-a / (3 * b)] if b else []
    else:
        root = (9 * b**2 - 20 * a * c) ** 0.5 if 9 * b**2 >= 20 * a * c else None
        squares = [] if root is None else [(-3 * b + sign * root) / (10 * c) for sign in (1, -1)]
    return [square**0.5 for square in squares if square > 0]
