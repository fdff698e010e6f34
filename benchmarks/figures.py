"""The pictures of all commands: one look, units on every axis, a legend where there is more than one series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import Environment

GREY, BLUE, ORANGE = "#9a9a9a", "#4c78a8", "#e4572e"
COLOURS = ("#4c78a8", "#e4572e", "#54a24b", "#b279a2", "#eeca3b", "#72b7b2", "#9d755d", "#9a9a9a", "#333333")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def where(environment: Environment) -> str:
    """The machine in one line."""
    threads = f", {environment.threads} thread{'s' * (environment.threads > 1)}" if environment.device == "cpu" else ""
    return f"{environment.machine}{threads}, {environment.dtype}, torch {environment.torch}"


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
    return path


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Bar:
    """A layer or network: how many times faster than the reference, and how much the bound would be."""

    label: str
    value: float
    bound: float | None
    network: bool = False


def speed_ups(path: Path, title: str, bars: Sequence[Bar], environment: Environment) -> Path:
    """One horizontal bar per layer, the bound as a mark."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 1.9 + 0.29 * len(bars)), layout="constrained")
    places = range(len(bars))
    axis.barh(places, [bar.value for bar in bars], color=[ORANGE if bar.network else BLUE for bar in bars])
    bounds = [(place, bar.bound) for place, bar in zip(places, bars, strict=True) if bar.bound is not None]
    widest = max(bar.value for bar in bars)
    shown = [(place, bound) for place, bound in bounds if bound <= 2 * widest]
    end_of_axis = 1.12 * max(widest, *(bound for _, bound in shown), 1.0)
    if shown:
        axis.scatter(
            [bound for _, bound in shown], [place for place, _ in shown], marker="|", s=160, color="black",
            label="bound: the plan's products by the BLAS, nothing else", zorder=3,
        )  # fmt: skip
    for place, bar in zip(places, bars, strict=True):  # beside the bar, or beside the mark where that is close
        close = bar.bound is not None and bar.value <= bar.bound <= bar.value + 0.1 * end_of_axis
        end = max(bar.value, bar.bound or 0.0) if close else bar.value
        axis.annotate(f"{bar.value:.1f}x", (end, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axis.axvline(1, color=GREY, linewidth=1.2, linestyle="--", label="equally fast")
    axis.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axis.set_ylim(len(bars) - 0.4, -0.6)  # the first on top
    axis.set_xlim(0, end_of_axis)
    axis.set_xlabel("times faster than F.conv2d with autograd, loss and gradient")
    _tidy(axis)
    figure.suptitle(f"{title}\n{where(environment)}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return _save(figure, path)


@dataclass(frozen=True)
class Line:
    """One series: points, and how it is drawn."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def lines(
    path: Path, title: str, panels: Mapping[str, Sequence[Line]], x_label: Mapping[str, str], y_label: str,
    environment: Environment, log_y: bool = True,
) -> Path:  # fmt: skip
    """Panels side by side, logarithmic axes."""
    pyplot = _pyplot()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(9, 0.8 + 3.3 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, series) in zip(axes.flat, panels.items(), strict=False):
        for index, line in enumerate(series):
            style = {"linestyle": "--", "marker": ""} if line.dashed else {"linestyle": "-", "marker": "o"}
            axis.plot(
                line.x, line.y, color=GREY if line.dashed else COLOURS[index], label=line.label, markersize=4, **style
            )
        axis.set_xscale("log", base=2)
        ticks = sorted({value for line in series for value in line.x})
        ticks = ticks if len(ticks) <= 9 else ticks[::2]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        if log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(x_label[name], fontsize=9)
        axis.set_ylabel(y_label, fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
        _tidy(axis)
    figure.suptitle(f"{title}\n{where(environment)}", fontsize=10)
    return _save(figure, path)


def bars(
    path: Path, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], y_label: str,
    environment: Environment, pattern: str = "{:.3g}",
) -> Path:  # fmt: skip
    """Vertical bars from zero with their values on top: one group per name, one colour per series."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    width = 0.88 / len(series)
    many = len(series) * len(groups) > 12
    for index, (name, values) in enumerate(series.items()):
        shown = [(at, value) for at, value in enumerate(values) if value is not None]
        places = [at + (index - (len(series) - 1) / 2) * width for at, _ in shown]
        drawn = axis.bar(
            places, [value for _, value in shown], width * 0.92, label=name, color=COLOURS[index % len(COLOURS)]
        )
        labels = [pattern.format(value) for _, value in shown]
        axis.bar_label(drawn, labels, padding=2, fontsize=6 if many else 8, rotation=90 if many else 0)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.margins(y=0.16 if many else 0.08)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylabel(y_label)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    _tidy(axis)
    figure.suptitle(f"{title}\n{where(environment)}", fontsize=10)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return _save(figure, path)
