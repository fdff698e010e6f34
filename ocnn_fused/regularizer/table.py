"""``print(reg)``: what an OrthRegularizer does with a model, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from ..modules import label
from ..plan import AnyPlan
from .selection import Layer, Selection
from .settings import Settings
from .steering import Known

_HEADER = ("layer", "weight shape", "stride", "groups", "trains", "method", "plan", "cost", "lambda", "least loss")


def describe(title: str, settings: Settings, progress: str, selection: Selection) -> str:
    """One row per regularised layer with its plan, share of the cost, lambda and least loss; then the others."""
    layers, steered = selection.layers, selection.known()
    costs = [layer.cost(settings.power_iterations) for layer in layers]
    rows = [
        _row(layer, layer.plan(settings.options), cost / sum(costs), *_steered(layer, steered))
        for layer, cost in zip(layers, costs, strict=True)
    ]
    header = (*_HEADER, "excess") if steered else _HEADER
    parts = [title, *_options(settings, progress)]
    if rows:
        parts += aligned([header, *(row[: len(header)] for row in rows)])
    else:
        parts.append(
            "nothing is regularised: "
            + ("every layer is left out" if selection.left_out else "the model has no Linear and no convolution layer")
        )
    notes = [(f"  {label(layer.name)}", layer.note) for layer in layers if layer.note]
    if notes:
        parts += ["notes:", *aligned(notes)]
    if selection.left_out:
        parts += ["left out:", *aligned([(f"  {label(name)}", reason) for name, reason in selection.left_out.items()])]
    return "\n".join(parts)


def _steered(layer: Layer, steered: Known) -> tuple[str, str]:
    """Lambda and excess in words."""
    if layer.name not in steered:
        return f"{layer.weight:g}", "-"
    value, excess = map(float, steered[layer.name])
    return f"{value:.3g} now", "-" if isnan(excess) else f"{excess:.3g} of {layer.tolerance:g}"


def _row(layer: Layer, plan: AnyPlan | None, share: float, weight: str, excess: str) -> tuple[str, ...]:
    floor = float(layer.floor) if layer.squared else layer.floor**0.5
    return (
        label(layer.name),
        "x".join(map(str, layer.problem.shape)),
        "x".join(map(str, layer.problem.stride)) or "-",
        str(layer.problem.groups),
        "yes" if layer.trains else "frozen",
        layer.method,
        plan.name if plan is not None else "power iteration",
        f"{share:.1%}",
        weight,
        f"{floor:g}",
        excess,
    )


def _options(settings: Settings, progress: str) -> list[str]:
    """What differs from the default, one line; ``progress`` where it depends on the step."""
    options = {
        f"target {settings.target}": settings.target != 1,
        "off-diagonal part": settings.part != "all",
        "norm, not squared": not settings.squared,
        "divided by the number of elements": settings.normalize == "numel",
        "counted from the least loss": settings.normalize == "excess",
        f"tolerance {settings.tolerance:g}": settings.tolerance != 1,
        f"schedule {settings.schedule!r}": settings.schedule is not None,
        f"every {settings.every} steps": settings.every > 1,
        progress: settings.goes_by_steps,
    }
    shown = [text for text, applies in options.items() if applies]
    return [", ".join(shown)] if shown else []


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
