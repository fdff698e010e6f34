"""Three kinds of small figures as SVG text. Colours are classes, so that the page decides on them, light or dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10

#: From a title and series of numbers to the text of a figure.
Draw = Callable[[str, Sequence[Sequence[float]]], str]

_WIDTH, _HEIGHT = 260, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 8, 8, 24


def curves(title: str, series: Sequence[Sequence[float]]) -> str:
    """Values over their rank from 0 to 100%, one line each, and a dotted line at 1."""
    top = max(1.2, *(max(values) * 1.05 for values in series))
    parts = [_frame([(value, f"{value:g}") for value in _ticks(top)], top, ("0", "50", "100%"), "rank")]
    parts.append(f'<path class="one" d="M{_LEFT} {_y(1, top)}H{_WIDTH - _RIGHT}"/>')
    for index, values in enumerate(series):
        last = max(1, len(values) - 1)
        points = " ".join(f"{_x(rank / last)},{_y(value, top)}" for rank, value in enumerate(values))
        points = points if len(values) > 1 else f"{points} {_x(1)},{_y(values[0], top)}"
        parts.append(f'<polyline class="line s{index}" points="{points}"/>')
    return _svg(title, parts)


def histogram(title: str, series: Sequence[Sequence[float]]) -> str:
    """Shares over equal intervals of [-1, 1], one outline each."""
    top = max(1e-9, *(max(values) * 1.1 for values in series))
    parts = [_frame([(value, f"{value:.0%}") for value in _ticks(top)], top, ("-1", "0", "1"), "correlation")]
    for index, values in enumerate(series):
        path = f"M{_x(0)} {_y(0, top)}"
        for position, value in enumerate(values, 1):
            path += f"V{_y(value, top)}H{_x(position / len(values))}"
        parts.append(f'<path class="area s{index}" d="{path}V{_y(0, top)}"/>')
    return _svg(title, parts)


def heat_map(title: str, rows: Sequence[Sequence[float]], top: float) -> str:
    """Cells as opaque as their value relative to ``top``; the lowest row below, as in a plot."""
    side = _HEIGHT - _TOP - _BOTTOM
    height, width = side / len(rows), side / len(rows[0])
    cells = [
        f'<rect x="{_LEFT + column * width:.2f}" y="{_TOP + side - (row + 1) * height:.2f}" width="{width + 0.05:.2f}" '
        f'height="{height + 0.05:.2f}" fill-opacity="{min(1.0, value / top) if top > 0 else 0:.2f}"/>'
        for row, values in enumerate(rows)
        for column, value in enumerate(values)
    ]
    frame = f'<rect class="edge" x="{_LEFT}" y="{_TOP}" width="{side}" height="{side}"/>'
    labels = [
        _text(_LEFT, _HEIGHT - 8, "start", "highest"),
        _text(_LEFT + side / 2, _HEIGHT - 8, "middle", "0"),
        _text(_LEFT + side, _HEIGHT - 8, "end", "highest"),
        _text(_LEFT + side + 10, _TOP + 10, "start", f"full: {top:.3g}"),
        _text(_LEFT + side + 10, _TOP + 26, "start", "none: 0"),
    ]
    return _svg(title, [f'<g class="map">{"".join(cells)}</g>', frame, *labels])


def _x(share: float) -> str:
    return f"{_LEFT + share * (_WIDTH - _LEFT - _RIGHT):.1f}"


def _y(value: float, top: float) -> str:
    return f"{_HEIGHT - _BOTTOM - min(1.0, value / top) * (_HEIGHT - _TOP - _BOTTOM):.1f}"


def _ticks(top: float) -> list[float]:
    """Two to five round numbers from 0 to ``top``."""
    power = 10.0 ** floor(log10(top))
    step = next(step * power for step in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if top / (step * power) <= 4.5)
    return [index * step for index in range(int(top / step + 1e-9) + 1)]


def _frame(ticks: Sequence[tuple[float, str]], top: float, below: tuple[str, str, str], axis: str) -> str:
    grid = "".join(f'<path class="grid" d="M{_LEFT} {_y(value, top)}H{_WIDTH - _RIGHT}"/>' for value, _ in ticks)
    left = "".join(_text(_LEFT - 4, float(_y(value, top)) + 3, "end", label) for value, label in ticks)
    places = zip(below, (0.0, 0.5, 1.0), ("start", "middle", "end"), strict=True)
    bottom = "".join(_text(float(_x(share)), _HEIGHT - 8, anchor, label) for label, share, anchor in places)
    return grid + left + bottom + _text(float(_x(0.75)), _HEIGHT - 8, "middle", axis)


def _text(x: float, y: float, anchor: str, label: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def _svg(title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
