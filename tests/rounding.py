"""Gradients with operands of the products rounded as tensor cores do, emulated for whole plans in PyTorch.

    python tests/rounding.py 3000        draws as many shapes and prints the largest errors of plans that may be chosen

Errors are in units of the definition's with equally rounded operands, which is what the direct row plan computes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from oracle import Case
from plans import candidates, job
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ocnn_fused.backends import pytorch
from ocnn_fused.backends.triton import refusal
from ocnn_fused.plan import Plan
from ocnn_fused.problem import DEFAULT_OPTIONS, Precision


def rounded(values: Tensor, precision: str) -> Tensor:
    """To nearest; ties away from zero in TF32 and to even in bfloat16, as the conversion instructions do."""
    if precision == "bf16":
        return values.bfloat16().to(values.dtype)
    bits = values.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).to(values.dtype)


class RoundedProducts(TorchFunctionMode):
    """Operands of the PyTorch executor's products are rounded as the tensor cores would."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = [rounded(operand, self.precision) for operand in args]
        return func(*args, **(kwargs or {}))


def gradient(weight: Tensor, plan: Plan, precision: Precision | None = None) -> Tensor:
    """In float64, but for the operands of products."""
    weight = weight.double()
    execute = pytorch.prepare([job(plan, weight)], weight.device, DEFAULT_OPTIONS)
    with nullcontext() if precision is None else RoundedProducts(precision):
        return execute([weight])[1][0]


def direct_row(case: Case) -> Plan:
    return next(plan for plan in candidates(case) if plan.is_diagonal and plan.side == "row" and not plan.small)


def matrix_plans(case: Case, precision: Precision) -> list[Plan]:
    """Those that may be chosen and use matrix products; small groups round nothing."""
    plans = (plan for plan in candidates(case) if not plan.small)
    return [plan for plan in plans if refusal(plan, torch.float32, "A100", precision) is None]


@dataclass(frozen=True)
class Ratio:
    """Root mean square and largest entry of the gradient's error, in units of the definition's."""

    rms: float
    largest: float


def error_ratios(weight: Tensor, case: Case, plans: Sequence[Plan], precision: Precision) -> list[Ratio]:
    """One for each plan."""
    exact, definition = (gradient(weight, direct_row(case), rounding) for rounding in (None, precision))
    unit = definition - exact
    errors = [gradient(weight, plan, precision) - exact for plan in plans]
    return [Ratio(float(e.norm() / unit.norm()), float(e.abs().max() / unit.abs().max())) for e in errors]


#: Of the weights: filters of length one, of the length that PyTorch initialises them with, shorter and longer ones.
SCALES = {"unit": 1.0, "initial": 3**-0.5, "short": 0.1, "long": 3.0}


def draw_case(rng: random.Random, most_work: float = 2e8) -> Case:
    """Any rank, kernel, stride, dilation, groups and padding that do not take too long."""
    while True:
        rank = rng.choice((1, 2, 2, 2, 3))
        groups = rng.choice((1, 1, 1, 2, 3))
        rows, channels = (round(2 ** rng.uniform(0, 7)) for _ in range(2))
        kernel = tuple(rng.randint(1, 7) for _ in range(rank))
        stride, dilation = (
            tuple(rng.choice(values) for _ in range(rank)) for values in ((1, 1, 2, 3, 4), (1, 1, 1, 2, 3))
        )
        padding = tuple(rng.randint(0, 6) // s * s for s in stride) if rng.random() < 0.1 else None
        case = Case((groups * rows, channels, *kernel), stride, dilation, groups, padding)
        if groups * rows * max(rows, channels) * channels * prod(kernel) ** 2 <= most_work:
            return case


def draw_weights(case: Case, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random ones of several sizes, and near an orthogonal one if there is any."""
    weight = case.random(seed)
    for name, scale in SCALES.items():
        yield name, scale * weight
    if case.has_orthogonal:
        yield "orthogonal", case.orthogonal(seed) + 1e-3 * weight


def main(count: int, seed: int = 0) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    worst: dict[tuple[str, str], list[tuple[Ratio, str]]] = {}
    measured = 0
    for index in range(count):
        case = draw_case(rng)
        precision: Precision = rng.choice(("tf32", "bf16"))
        plans = [plan for plan in matrix_plans(case, precision) if not plan.is_diagonal or plan.side == "column"]
        for name, weight in draw_weights(case, index) if plans else ():
            for plan, ratio in zip(plans, error_ratios(weight, case, plans, precision), strict=True):
                found = worst.setdefault((plan.algorithm, name), [])
                found.append((ratio, f"{case} {plan.name} {precision}"))
                measured += 1
    print(f"{count} shapes, {measured} gradients")
    for (kind, name), found in sorted(worst.items()):
        print(f"{kind} {name}: {len(found)} gradients")
        for what, measure in (("root mean square", "rms"), ("largest entry", "largest")):
            ratios = sorted(((getattr(ratio, measure), label) for ratio, label in found), reverse=True)
            print(f"  {what}: {sum(ratio > 4 for ratio, _ in ratios)} above 4")
            for ratio, label in ratios[:3]:
                print(f"    {ratio:.2f}  {label}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(int, sys.argv[2:]))
