"""How the time grows: with channels, kernel, number of layers, threads and ranks, beside the growth of the arithmetic.

    python benchmarks/scaling.py                           everything
    python benchmarks/scaling.py --axis channels threads   these axes

The exponent of an axis is the slope of a straight line through the logarithms of times and sizes, over the upper half
of the sizes; that of the arithmetic is the slope of the multiply-adds of the chosen plans over the same sizes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import figures
import numpy as np
import ranks
from bound import plan_of
from compare import BOTH
from contenders import FUSED, ONE_BY_ONE, REFERENCE, calls_of
from harness import Harness, parser_of, run
from record import Rows
from shapes import Layer
from steps import Settings, expand, make_weights
from tables import markdown, milliseconds, ratio, table, times, verdict

COMMAND = "scaling"

#: The reference is left out where one step would take longer than this many multiply-adds: minutes.
REFERENCE_LIMIT = 1e11


@dataclass(frozen=True)
class Axis:
    """What grows, and why the time may grow otherwise than the arithmetic."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    layers: Callable[[int], Sequence[Layer]]
    reason: str


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            "channels", "channels C of a CxCx3x3 layer", (16, 32, 64, 128, 256, 512, 1024, 2048),
            (16, 32, 64, 128, 256, 512),
            lambda size: [Layer("square", (size, size, 3, 3))],
            "Products grow with C^3, everything else (planes, mixing, gathering) with C^2, and a call has a fixed "
            "cost; larger products run at a better rate too. So the slope is below 3, and nearer to it as C grows.",
        ),
        Axis(
            "kernel", "taps k of a 16x16xkxk layer", (1, 3, 5, 7, 9, 11, 15, 21, 31), (1, 3, 5, 7, 9, 15),
            lambda size: [Layer("square", (16, 16, size, size))],
            "Up to 5 taps the products are evaluations at (2k-1)^2 points, above that frequencies, of which there are "
            "as many; tables and transforms grow alike. Matrices of 16x16 are too small for the full rate, and the "
            "FFT's sizes jump to those that it likes.",
        ),
        Axis(
            "layers", "layers of 32x32x3x3 in one call", (1, 2, 5, 10, 20, 50, 100, 200), (1, 2, 5, 10, 20, 50),
            lambda size: [Layer("small", (32, 32, 3, 3), count=size)],
            "The fixed cost of a call is paid once however many layers there are: the first ones are nearly free.",
        ),
    )
}  # fmt: skip
THREADS, RANKS = "threads", "ranks"
THREAD_LAYERS = (Layer("256", (256, 256, 3, 3)), Layer("512", (512, 512, 3, 3)))
#: From one thread to two, on the layers of 256 and 512 channels.
THREAD_TARGET = 1.6
MULTIPLY_ADDS = "multiply_adds"


def upper_half(sizes: Sequence[float]) -> int:
    """How many of the largest sizes are fitted, at least three."""
    return max(3, (len(sizes) + 1) // 2)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent fitted over the upper half of the sizes."""
    kept = upper_half(sizes)
    return float(np.polyfit(np.log(sizes[-kept:]), np.log(values[-kept:]), 1)[0])


def measure_axis(harness: Harness, axis: Axis) -> None:
    for size in axis.quick if harness.options.quick else axis.sizes:
        layers = axis.layers(size)
        every = expand(layers)
        plans = [plan_of(layer, harness.settings) for layer in every]
        work = sum(plan.work.multiply_adds for plan in plans)
        plain = sum(plan.reference_multiply_adds for plan in plans)
        names = [REFERENCE] * (plain < REFERENCE_LIMIT) + [ONE_BY_ONE] * (len(every) > 1) + [FUSED]
        harness.announce(f"{axis.name} {size}")
        calls = calls_of(names, make_weights(every, harness.settings), every, harness.settings)
        details = {"size": size, MULTIPLY_ADDS: work, "reference_multiply_adds": plain, "plan": plans[0].name}
        harness.time(axis.name, f"{size}", calls, BOTH, details)


def measure_threads(harness: Harness) -> None:
    """Of one process; each number of threads is a contender in the same rounds."""
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= len(os.sched_getaffinity(0))]

    def with_threads(settings: Settings, call: Callable[[], object]) -> None:
        settings.apply()
        call()

    for layer in THREAD_LAYERS:
        calls = {}
        for count in counts:
            settings = replace(harness.settings, threads=count)
            settings.apply()
            verified = calls_of((REFERENCE, FUSED), make_weights([layer], settings), [layer], settings)
            for name, call in verified.items():
                calls[f"{name}, {count}"] = partial(with_threads, settings, call)
        harness.time(THREADS, layer.label, calls, BOTH, {"counts": counts})
    harness.settings.apply()


# ----------------------------------------------------------------------------------------------------------------------
# Tables and pictures
# ----------------------------------------------------------------------------------------------------------------------


def _series(rows: Rows, axis: str, contender: str) -> tuple[list[float], list[float]]:
    kept = [row for row in rows.where(section=axis) if row.contender == contender]
    kept.sort(key=lambda row: row.details["size"])
    return [row.details["size"] for row in kept], [row.p50 for row in kept]


def _arithmetic(rows: Rows, axis: str, which: str = MULTIPLY_ADDS) -> tuple[list[float], list[float]]:
    known = {row.details["size"]: row.details[which] for row in rows.where(section=axis, contender=FUSED)}
    return sorted(known), [known[size] for size in sorted(known)]


def axis_table(rows: Rows, axis: Axis) -> str:
    body = []
    for subject, own in sorted(rows.where(section=axis.name).by("subject"), key=lambda one: int(one[0])):
        fused, reference = own.need(contender=FUSED), own.median(contender=REFERENCE)
        work = fused.details[MULTIPLY_ADDS]
        body.append(
            {
                axis.unit: subject,
                "plan": fused.details["plan"],
                **{f"{name} ms": milliseconds(own.median(contender=name)) for name in (REFERENCE, ONE_BY_ONE, FUSED)},
                "speed-up": times(ratio(reference, fused.p50)),
                "million multiply-adds": f"{work / 1e6:.4g}",
                "billion per s": f"{work / fused.p50 / 1e9:.1f}",
            }
        )
    return table(body, ("plan",))


def exponents_table(rows: Rows) -> str:
    body = []
    for axis in AXES.values():
        sizes, seconds = _series(rows, axis.name, FUSED)
        if len(sizes) < 3:
            continue
        _, work = _arithmetic(rows, axis.name)
        plain_sizes, plain = _series(rows, axis.name, REFERENCE)
        plain_known = dict(zip(*_arithmetic(rows, axis.name, "reference_multiply_adds"), strict=True))
        measured, counted = slope(sizes, seconds), slope(sizes, work)
        theirs = slope(plain_sizes, plain), slope(plain_sizes, [plain_known[size] for size in plain_sizes])
        exponents = [f"{exponent:.2f}" for exponent in (measured, counted, *theirs)]
        reason = axis.reason if abs(measured - counted) > 0.1 else "They agree."
        body.append([axis.unit, f"{sizes[-upper_half(sizes)]:g} to {sizes[-1]:g}", *exponents, reason])
    header = ["axis", "fitted over", "time, fused", "its arithmetic", "time, reference", "its arithmetic"]
    return markdown([*header, "why they differ"], body, (0, 1, 6))


def threads_table(rows: Rows) -> str:
    body = []
    for subject, own in rows.where(section=THREADS).by("subject"):
        for name in (REFERENCE, FUSED):
            values = {count: own.median(contender=f"{name}, {count}") for count in own.every[0].details["counts"]}
            cells = {"layer": f"{subject}, {name}"}
            for count, value in values.items():
                faster = times(ratio(values[1], value))
                cells[f"{count} thread{'s' * (count > 1)}, ms"] = f"{milliseconds(value)} ({faster})"
            if name == FUSED and 2 in values:
                cells["target"] = verdict(ratio(values[1], values[2]), THREAD_TARGET)
            body.append(cells)
    return table(body, ("target",))


def tables(rows: Rows) -> str:
    parts = ["### Exponents", exponents_table(rows)]
    for axis in AXES.values():
        if len(rows.where(section=axis.name)):
            parts += [f"### {axis.name.capitalize()}", axis_table(rows, axis)]
    if len(rows.where(section=THREADS)):
        parts += ["### Threads", threads_table(rows)]
    if len(rows.where(section=RANKS)):
        parts += ["### Ranks", ranks.processes_table(rows.where(section=RANKS))]
    return "\n\n".join(parts)


def draw(rows: Rows, folder: Path) -> list[Path]:
    panels, labels = {}, {}
    for axis in AXES.values():
        if not len(rows.where(section=axis.name)):
            continue
        series = []
        for name in (REFERENCE, ONE_BY_ONE, FUSED):
            sizes, seconds = _series(rows, axis.name, name)
            if sizes:
                series.append(figures.Line(name, sizes, [value * 1e3 for value in seconds]))
        sizes, work = _arithmetic(rows, axis.name)
        scale = series[-1].y[-1] / work[-1]
        scaled = [scale * value for value in work]
        series.append(figures.Line("the fused plan's multiply-adds, scaled", sizes, scaled, dashed=True))
        panels[axis.name], labels[axis.name] = series, axis.unit
    if not panels:
        return []
    title = "Growth of loss and gradient"
    return [figures.lines(folder / "scaling.png", title, panels, labels, "ms", rows.every[0].environment)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    every = [*AXES, THREADS, RANKS]
    parser.add_argument("--axis", nargs="+", choices=every, default=every, help="what grows (default: everything)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    harness = Harness(COMMAND, options)
    axes = [AXES[name] for name in options.axis if name in AXES]
    rows = sum(len(axis.quick if options.quick else axis.sizes) for axis in axes)
    rows += len(THREAD_LAYERS) * (THREADS in options.axis) + len(ranks.WORLDS) * (RANKS in options.axis)
    with harness.progress(rows):
        for axis in axes:
            measure_axis(harness, axis)
        if THREADS in options.axis and options.device == "cpu":
            measure_threads(harness)
        if RANKS in options.axis and options.device == "cpu":
            ranks.measure(harness, RANKS)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
