"""``print(reg)``: what an OrthRegularizer does with a model, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import backends
from .plan import CPU_RATES, Plan, Rates

if TYPE_CHECKING:
    from .regularizer import OrthRegularizer
    from .selection import Layer

_HEADER = ("layer", "weight shape", "stride", "groups", "method", "plan", "cost", "lambda", "least loss")


def describe(reg: OrthRegularizer) -> str:
    """One row per regularised layer with its plan, share of the cost, lambda and least loss; then the others."""
    layers = list(reg.layers.values())
    rates = [_rates(layer, reg._backend["backend"]) for layer in layers]
    costs = [layer.cost(reg.power_iterations, of) for layer, of in zip(layers, rates, strict=True)]
    plans = [layer.plan(of) for layer, of in zip(layers, rates, strict=True)]
    rows = [_row(reg, layer, plan, cost / sum(costs)) for layer, plan, cost in zip(layers, plans, costs, strict=True)]
    parts = [repr(reg), *_options(reg), *_aligned([_HEADER, *rows])]
    left_out = reg.left_out
    if left_out:
        parts += ["left out:", *_aligned([(f"  {name}", reason) for name, reason in left_out.items()])]
    return "\n".join(parts)


def _rates(layer: Layer, backend: str | None) -> Rates:
    """Of the backend that computes the layer, by which it chooses the plan."""
    return backends.choose(layer.device, backend).RATES if layer.device.type in ("cpu", "cuda") else CPU_RATES


def _row(reg: OrthRegularizer, layer: Layer, plan: Plan | None, share: float) -> tuple[str, ...]:
    floor = float(layer.floor) if reg.squared else layer.floor**0.5
    return (
        layer.name,
        "x".join(map(str, layer.shape)),
        "x".join(map(str, layer.stride)) or "-",
        str(layer.groups),
        layer.method,
        plan.name if plan is not None else "power iteration",
        f"{share:.1%}",
        f"{layer.weight:g}",
        f"{floor:g}",
    )


def _options(reg: OrthRegularizer) -> list[str]:
    """What differs from the default, one line."""
    options = []
    if not reg.squared:
        options.append("norm, not squared")
    if reg.normalize != "none":
        options.append("divided by the number of elements")
    if reg.schedule is not None:
        options.append(f"schedule {reg.schedule!r}")
    if reg.every > 1:
        options.append(f"every {reg.every} steps")
    if reg.schedule is not None or reg.every > 1:
        options.append(f"step {reg.steps}, factor {reg.factor:g}")
    return [", ".join(options)] if options else []


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
