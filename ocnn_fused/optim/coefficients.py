"""Odd polynomials that move singular values towards 1: one triple ``(a, b, c)`` per step, ``a s + b s^3 + c s^5``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from math import asin, cos, isfinite, pi, prod, sin, sqrt
from typing import Literal, NamedTuple

from ..problem import check_choice

Step = tuple[float, float, float]
Coefficients = Literal["minimax", "muon", "rational"] | Sequence[Sequence[float]]

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


# ----------------------------------------------------------------------------------------------------------------------
# Rational functions
# ----------------------------------------------------------------------------------------------------------------------


class Rational(NamedTuple):
    """``s (factor + sum of weight / (s^2 + pole))``."""

    factor: float
    fractions: tuple[tuple[float, float], ...]  # pole, weight


@lru_cache(maxsize=64)
def rational(poles: int, lower: float = LOWER) -> Rational:
    """Zolotarev's function: of all odd rational functions of its degree the nearest to 1 on ``[lower, 1]``.

    ``s prod (s^2 + c_2j) / (s^2 + c_2j-1)`` with ``c_i = lower^2 sn^2(i K / (2r + 1)) / cn^2(...)``, elliptic functions
    of the modulus ``sqrt(1 - lower^2)``; scaled so that it lies as far above 1 as below.
    """
    tangents = [_tangent_of_elliptic(i / (2 * poles + 1), lower) for i in range(1, 2 * poles + 1)]
    c = [(lower * tangent) ** 2 for tangent in tangents]
    odd, even = c[::2], c[1::2]

    def unscaled(s: float) -> float:
        return s * prod((s**2 + e) / (s**2 + o) for e, o in zip(even, odd, strict=True))

    # It takes its least and its largest value in turns, at the ends first; between them near the roots of these.
    grid = [lower ** (1 - i / 20000) for i in range(20001)]
    values = [unscaled(s) for s in grid]
    factor = 2 / (min(values) + max(values))
    weights = [factor * prod(e - o for e in even) / prod(other - o for other in odd if other != o) for o in odd]
    return Rational(factor, tuple(zip(odd, weights, strict=True)))


def _tangent_of_elliptic(share: float, lower: float) -> float:
    """``sn/cn`` at ``share`` of the quarter period, for the complementary modulus ``lower``: by the means of Gauss."""
    a, b = [1.0], lower
    c = [sqrt(1 - lower**2)]
    while abs(c[-1]) > 1e-15:
        mean, difference = (a[-1] + b) / 2, (a[-1] - b) / 2
        b = sqrt(a[-1] * b)
        a.append(mean)
        c.append(difference)
    steps = len(a) - 1
    angle = 2**steps * share * pi / 2  # amplitude, halved on the way down
    for one_a, one_c in zip(reversed(a[1:]), reversed(c[1:]), strict=True):
        angle = (angle + asin(max(-1.0, min(1.0, one_c / one_a * sin(angle))))) / 2
    return sin(angle) / cos(angle)
