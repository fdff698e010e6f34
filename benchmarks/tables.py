"""Tables in markdown that also line up in a terminal, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def table(rows: Sequence[Mapping[str, str]], words: Collection[str] = ()) -> str:
    """Rows by the names of their columns; the first column and ``words`` are text, the others numbers."""
    if not rows:
        return "Nothing has been measured."
    names = list(dict.fromkeys(name for row in rows for name in row))
    left = [index for index, name in enumerate(names) if not index or name in words]
    return markdown(names, [[row.get(name, "") for name in names] for row in rows], left)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns ``left`` are words, the others numbers."""
    columns = []
    for index, column in enumerate(zip(header, *rows, strict=True)):
        width = max(3, *map(len, column))
        columns.append([cell.ljust(width) if index in left else cell.rjust(width) for cell in column])
    head, *body = ("| " + " | ".join(row) + " |" for row in zip(*columns, strict=True))
    widths = [len(column[0]) for column in columns]
    rule = ["-" * width if index in left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    return "\n".join([head, f"| {' | '.join(rule)} |", *body])


def number(value: float | None, pattern: str) -> str:
    """A dash where there is nothing to show."""
    return "-" if value is None else pattern.format(value)


def milliseconds(seconds: float | None) -> str:
    """Three digits or so."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.{sum(value < limit for limit in (1, 10, 100))}f}"


def times(ratio: float | None) -> str:
    """Three digits."""
    digits = 0 if ratio is None else sum(ratio < limit for limit in (9.995, 99.95))
    return number(ratio, f"{{:.{digits}f}}x")


def megabytes(value: float | None) -> str:
    return number(None if value is None else value / 1e6, "{:.1f}")


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def verdict(value: float | None, target: float, at_most: bool = False) -> str:
    """Of a ratio and what it should be at least, or at most."""
    met = value is not None and (value <= target if at_most else value >= target)
    return f"{target:g}x {'met' if met else 'missed'}"
