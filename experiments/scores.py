"""Scores, their differences between methods, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

#: Student's t for a two-sided 95% interval, by the number of pairs.
CRITICAL = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23}


@dataclass(frozen=True)
class Score:
    """A number of a result: how it is called, found and written, and whether more is better."""

    name: str
    find: Callable[[dict[str, Any]], float | None]
    more_is_better: bool = True
    digits: int = 2

    def write(self, value: float, sign: bool = False) -> str:
        return f"{value:{'+' if sign else ''}.{self.digits}f}"


def percent(name: str, key: str, more_is_better: bool = True) -> Score:
    return Score(f"{name}, %", lambda result: None if result[key] is None else 100 * result[key], more_is_better)


def number(name: str, key: str, more_is_better: bool = True, digits: int = 2) -> Score:
    return Score(name, lambda result: result[key], more_is_better, digits)


@dataclass(frozen=True)
class Difference:
    """Of two methods, pair by pair."""

    values: list[float]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; from three pairs on."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) >= 3 else None

    def write(self, score: Score) -> str:
        error = "" if self.error is None else f" ± {score.write(self.error)}"
        return f"{score.write(self.mean, sign=True)}{error} ({len(self.values)})"

    @property
    def half_width(self) -> float | None:
        """Of the 95% interval of the mean."""
        return None if self.error is None else CRITICAL.get(len(self.values), 2.0) * self.error


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
