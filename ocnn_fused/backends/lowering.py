"""Plans as flat numbers and tensors, the form in which compiled code takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import Matrix, Plan


class Lowered(NamedTuple):
    """Arguments of the op ``execute_plan`` that depend on the plan alone, in order; see csrc/registration.cpp."""

    groups: int
    column: bool
    flat: bool
    evaluation: list[Tensor]
    sources: list[int]
    runs: list[int]
    outputs: int
    mix: list[Tensor]
    offset: float


def to_tensor(matrix: Matrix, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Rounded once, from the exact value."""
    return torch.tensor([[float(value) for value in row] for row in matrix], dtype=torch.float64).to(device, dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=1024)
def lower(plan: Plan, dtype: torch.dtype) -> Lowered:
    sources: list[int] = []
    for block in plan.blocks:
        sources.append(block.residues)
        sources += [tap for residue in block.sources for tap in residue]
    mix: list[Tensor] = []
    if not plan.is_diagonal:
        symmetric, antisymmetric = plan.symmetric, plan.antisymmetric
        adjoint, adjoint_anti = plan.adjoint(symmetric), plan.adjoint(antisymmetric)
        mix = [
            to_tensor(symmetric, dtype),
            to_tensor(antisymmetric[1:], dtype),  # lag 0 is symmetric
            to_tensor(adjoint, dtype),
            to_tensor(tuple(row[1:] for row in adjoint_anti), dtype),
        ]
    return Lowered(
        groups=plan.groups,
        column=plan.side == "column",
        flat=plan.is_flat,
        evaluation=[to_tensor(block.evaluation, dtype) for block in plan.blocks],
        sources=sources,
        runs=[
            number
            for run in plan.runs
            for number in (run.block, run.left, run.right, run.out, run.count, int(run.summed))
        ],
        outputs=plan.outputs,
        mix=mix,
        offset=float(plan.offset),
    )


class LoweredSmall(NamedTuple):
    """Arguments of the op ``execute_small``: tap pairs sorted by lag, zero first."""

    groups: int
    left: list[int]
    right: list[int]
    lag_begin: list[int]


@lru_cache(maxsize=1024)
def lower_small(plan: Plan) -> LoweredSmall:
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(plan.outputs)]
    for block, left, right, out in plan.products:
        pairs[out] += [(source[left], source[right]) for source in plan.blocks[block].sources]
    begin = [0]
    for of_lag in pairs:
        begin.append(begin[-1] + len(of_lag))
    flat = [pair for of_lag in pairs for pair in of_lag]
    return LoweredSmall(plan.groups, [left for left, _ in flat], [right for _, right in flat], begin)
