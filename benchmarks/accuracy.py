"""Errors of loss and gradient against the definition in float64, by precision and algorithm.

    python benchmarks/accuracy.py            every algorithm that a layer's candidates offer, random and near orthogonal
    python benchmarks/accuracy.py --quick    one seed

Weights of float32, bfloat16 and float16 by every plan on the CPU, beside F.conv2d in the same dtype; and weights of
float32 with the operands of products rounded to TF32 or bfloat16 as tensor cores do, emulated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from math import floor, log10
from pathlib import Path

import figures
import torch
from contenders import CONTENDERS, REFERENCE, Loss
from definitions import paper
from harness import Harness, parser_of, run
from record import RELATIVE, ROOT, Rows
from shapes import Layer
from tables import number, table
from torch import Tensor

from ocnn_fused import init
from ocnn_fused.backends import MODULES, fourier
from ocnn_fused.backends.job import Job, Operand
from ocnn_fused.backends.triton import refusal
from ocnn_fused.plan import AnyPlan, FourierPlan, candidates
from ocnn_fused.problem import DEFAULT_OPTIONS

sys.path.append(str(ROOT / "tests"))
from oracle import near
from rounding import gradient as rounded_gradient

COMMAND = "accuracy"
LAYERS = (
    Layer("3x3", (64, 64, 3, 3)),
    Layer("strided", (64, 32, 3, 3), 2),
    Layer("wide", (96, 24, 3, 3)),
    Layer("discriminator", (48, 24, 4, 4), 2),
    Layer("5x5", (48, 48, 5, 5)),
    Layer("7x7", (24, 24, 7, 7)),
    Layer("1x1", (256, 64, 1, 1)),
    Layer("depthwise", (64, 1, 7, 7), groups=64),
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EMULATED = ("tf32", "bf16")
RANDOM, NEAR = "random", "near orthogonal"
LOSS, GRADIENT = "error of the loss", "error of the gradient"
PLAIN = "F.conv2d"
NOISE = 1e-3


def _random(layer: Layer, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    length = (layer.shape[1] * torch.Size(layer.shape[2:]).numel()) ** 0.5
    return torch.randn(layer.shape, generator=generator, dtype=torch.float64) / length


def _near(layer: Layer, seed: int) -> Tensor:
    """An exactly orthogonal kernel moved by a thousandth of its length."""
    torch.manual_seed(seed)
    weight = torch.empty(layer.shape, dtype=torch.float64)
    init.orthogonal_(weight, layer.stride, groups=layer.groups)
    return near(weight, NOISE, seed)


STARTS: dict[str, Callable[[Layer, int], Tensor]] = {RANDOM: _random, NEAR: _near}


def by_plan(weight: Tensor, layer: Layer, plan: AnyPlan) -> tuple[Tensor, Tensor]:
    """Loss and gradient by this very plan on the CPU."""
    operand = Operand(weight.stride(), weight.dtype, True)
    if isinstance(plan, FourierPlan):
        execute = fourier.prepare((Job(layer.problem, plan, operand),), weight.device)
    else:
        execute = MODULES["cpu"].prepare((Job(layer.problem, plan, operand),), weight.device, DEFAULT_OPTIONS)
    losses, grads = execute([weight])
    return losses[0], grads[0]


def by_autograd(formula: Loss, weight: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a formula."""
    leaf = weight.clone().requires_grad_()
    loss = formula(leaf, layer)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def error(value: Tensor, wanted: Tensor) -> float:
    return float((value.double() - wanted).norm() / wanted.norm())


def measure(harness: Harness, layer: Layer, start: str, seeds: int) -> None:
    plans = {plan.name: plan for plan in candidates(layer.problem, "auto")}
    errors: dict[tuple[str, str, str], list[float]] = {}
    for seed in range(seeds):
        original = STARTS[start](layer, seed)
        for name, dtype in DTYPES.items():
            weight = original.to(dtype)
            wanted = by_autograd(paper, weight.double(), layer)
            found = {PLAIN: by_autograd(CONTENDERS[REFERENCE].loss, weight, layer)}
            found |= {key: by_plan(weight, layer, plan) for key, plan in plans.items()}
            for contender, outcome in found.items():
                for what, value, true in zip((LOSS, GRADIENT), outcome, wanted, strict=True):
                    errors.setdefault((name, contender, what), []).append(error(value, true))
        wanted = by_autograd(paper, original.float().double(), layer)
        for precision in EMULATED:
            for key, plan in plans.items():
                if isinstance(plan, FourierPlan) or plan.small:
                    continue
                value = rounded_gradient(original.float(), plan, precision)  # type: ignore[arg-type]
                errors.setdefault((f"float32, {precision} products", key, GRADIENT), []).append(error(value, wanted[1]))
    for (dtype_name, contender, what), values in errors.items():
        refused = None
        if "products" in dtype_name:
            refused = refusal(plans[contender], torch.float32, "A100", dtype_name.split()[1])  # type: ignore[arg-type]
        details = {"start": start, "dtype": dtype_name, "refused": refused}
        harness.add(f"{layer.label}, {start}", layer.label, contender, what, RELATIVE, values, None, details)
    harness.advance()


def _gradient_errors(rows: Rows) -> dict[str, str]:
    """Of one algorithm, by precision; in brackets where it is never chosen."""
    cells = {}
    for row in rows.where(measure=GRADIENT):
        cells[row.details["dtype"]] = f"({row.p50:.1e})" if row.details["refused"] else f"{row.p50:.1e}"
    return cells


def tables(rows: Rows) -> str:
    body = []
    for subject, start in product(rows.names("subject"), (RANDOM, NEAR)):
        kept = Rows(row for row in rows.where(subject=subject) if row.details["start"] == start)
        for contender, own in kept.by("contender"):
            loss = next((row.p50 for row in own.where(measure=LOSS) if row.details["dtype"] == "float32"), None)
            cells = _gradient_errors(own)
            body.append({"layer": subject, "weights": start, "algorithm": contender,
                         "loss, float32": number(loss, "{:.1e}"), **cells})  # fmt: skip
    return table(body, ("weights", "algorithm")) + (
        "\n\nErrors relative to the norm of the exact loss or gradient, medians over seeds; columns after the loss are "
        "those of the gradient. Near orthogonal: moved by a thousandth of its length from an exactly orthogonal "
        "kernel, where loss and gradient are small differences and every algorithm loses digits. TF32 and bfloat16 "
        "products are emulated; `F.conv2d` is not among them. In brackets: not chosen at this precision, because "
        "it amplifies rounding too much."
    )


def draw(rows: Rows, folder: Path) -> list[Path]:
    drawn = []
    for start in (RANDOM, NEAR):
        kept = Rows(
            row
            for row in rows.where(measure=GRADIENT)
            if row.details["start"] == start and row.details["dtype"] == "float32"
        )
        kinds = {
            PLAIN: "F.conv2d",
            "direct": "tap pairs",
            "toom": "Toom-Cook",
            "fourier": "Fourier",
            "gram": "Gram",
            "small": "per channel",
        }
        subjects = kept.names("subject")
        series: dict[str, list[float | None]] = {}
        for prefix, label in kinds.items():
            values = []
            for subject in subjects:
                found = [row.p50 for row in kept.where(subject=subject) if row.contender.startswith(prefix)]
                values.append(min(found) if found else None)
            if any(value is not None for value in values):
                series[label] = values
        labels = [subject.replace(" ", "\n") for subject in subjects]
        title = f"Error of the float32 gradient against float64, {start} weights"
        power = floor(log10(max(value for values in series.values() for value in values if value)))
        scaled = {name: [value and value / 10**power for value in values] for name, values in series.items()}
        path, y_label = folder / f"accuracy-{start.split()[0]}.png", f"relative error, in units of 1e{power}"
        drawn.append(figures.bars(path, title, labels, scaled, y_label, rows.every[0].environment, pattern="{:.2g}"))
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__).parse_args(arguments)
    harness = Harness(COMMAND, options)
    seeds = 1 if options.quick else 5
    with harness.progress(len(LAYERS) * len(STARTS)):
        for layer, start in product(LAYERS, STARTS):
            harness.announce(f"{layer.label}, {start}")
            measure(harness, layer, start, seeds)
    harness.report(tables, draw)


if __name__ == "__main__":
    run(main)
