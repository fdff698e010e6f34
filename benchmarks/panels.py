"""Panels against the BLAS: the two ways in which the CPU backend multiplies, in turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from contenders import CONTENDERS, FUSED, Judge
from shapes import Layer
from steps import Settings, make_weights
from timing import EAGER, Effort, Timer, interleave

from ocnn_fused import _extension

#: By the setting of the compiled switch.
WAYS = {True: "panels", False: "BLAS"}


def _step(allowed: bool, step: Callable[..., object], *arguments: object) -> None:
    before = _extension.module.use_panels(allowed)
    try:
        step(*arguments)
    finally:
        _extension.module.use_panels(before)


def table(layers: Sequence[Layer], settings: Settings, effort: Effort, timer: Timer) -> str:
    """Markdown: medians in ms. Layers that panels do not take are the BLAS's both times, and their ratio is 1."""
    lines = [f"| layer | {' ms | '.join(WAYS.values())} ms | BLAS / panels |", "|---|---:|---:|---:|"]
    for layer in layers:
        weights = make_weights([layer], settings)
        judge = Judge(weights, [layer], settings.gradient)
        contestants = {}
        for allowed in WAYS:
            _step(allowed, judge.check, CONTENDERS[FUSED])
            call = partial(_step, allowed, CONTENDERS[FUSED].step, weights, [layer], settings.gradient)
            contestants[allowed] = timer.prepare(call, EAGER)
        samples = interleave(contestants, timer, effort)
        panels, blas = (median(samples[allowed]) for allowed in WAYS)
        lines.append(f"| {layer.label} | {panels * 1e3:.3f} | {blas * 1e3:.3f} | {blas / panels:.2f} |")
    return "\n".join(lines)
