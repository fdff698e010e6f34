"""Plans as flat numbers and tensors, the form in which compiled code takes them (csrc/lowered.h)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..plan import Block, Matrix, Plan, Run, Scheme

#: A self-paired product joins the batch of the pairs, at the cost of a second plane, while it is as small as this.
_JOINED_MULTIPLY_ADDS = 80**3


class Lowered(NamedTuple):
    """Arguments of the op ``execute_plan`` that depend on the plan alone; see ``read_plan`` in csrc/lowered.h."""

    layout: Tensor  # int64, on the CPU
    tables: Tensor  # the same numbers where the weights are
    constants: Tensor  # entries of the matrices, in the accumulation dtype, where the weights are


def to_tensor(matrix: Matrix, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Rounded once, from the exact value."""
    return torch.tensor([[float(value) for value in row] for row in matrix], dtype=torch.float64).to(device, dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Constants:
    """Collects matrices; ``add`` tells where one begins."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, *matrices: Matrix) -> int:
        begin = len(self.values)
        self.values += [float(value) for matrix in matrices for row in matrix for value in row]
        return begin


def _halves(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Even and odd half of a ``(points, span)`` matrix whose rows 1, 2 | 3, 4 | ... mirror each other.

    With ``s_q = x_q + x_(n-1-q)`` and ``d_q`` their difference, the rows of a pair are ``even s + odd d`` and
    ``even s - odd d``; row 0 and a middle column are their own mirror images.
    """
    span = len(matrix[0])
    firsts = matrix[1::2]
    assert all(tuple(reversed(a)) == b for a, b in zip(firsts, matrix[2::2], strict=True))
    half = Fraction(1, 2)
    even = [matrix[0][: (span + 1) // 2]]
    even += [tuple((row[q] + row[span - 1 - q]) * half for q in range((span + 1) // 2)) for row in firsts]
    # A middle element is counted once in s.
    odd = [tuple((row[q] - row[span - 1 - q]) * half for q in range(span // 2)) for row in firsts]
    return tuple(even), tuple(odd)


def _is_identity(matrix: Matrix) -> bool:
    return all(value == (i == j) for i, row in enumerate(matrix) for j, value in enumerate(row))


def _factor(matrix: Matrix, constants: _Constants) -> int:
    """Where the halves of a per-axis matrix lie, -1 for the identity."""
    return -1 if _is_identity(matrix) else constants.add(*_halves(matrix))


def _axis(scheme: Scheme, constants: _Constants) -> list[int]:
    transposed_mix = tuple(zip(*scheme.mix, strict=True))
    return [
        len(scheme.evaluation),
        len(scheme.evaluation[0]),
        _factor(scheme.evaluation, constants),
        len(scheme.partner),
        _factor(transposed_mix, constants),
    ]


def _lag_of(plan: Plan, block: Block) -> list[int]:
    """For every output of the block's grid, the lag that mix puts there, of all lags in order; -1 if it is dropped."""
    all_lags = itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in plan.axes))
    index = {lag: position for position, lag in enumerate(all_lags)}
    reach = [len(scheme.partner) // 2 for scheme in block.factors]
    return [index.get(lag, -1) for lag in itertools.product(*(range(-r, r + 1) for r in reach))]


def _joins(plan: Plan, index: int) -> int:
    """How many self-paired products of a block go into one batch with its pairs, or 0 if they stay apart.

    A batch more costs as much as a small product, so that a second copy of the plane is cheaper.
    """
    block = plan.blocks[index]
    products = [product for product in plan.products if product[0] == index]
    contraction = plan.rows if plan.side == "column" else plan.channels * block.residues
    is_paired = len({out for *_, out in products}) == len(products) and len(products) < block.planes
    if plan.is_diagonal or not is_paired or plan.work_rows**2 * contraction > _JOINED_MULTIPLY_ADDS:
        return 0
    return 2 * len(products) - block.planes


def _runs(plan: Plan, joined: Sequence[int]) -> Iterator[Run]:
    for run in plan.runs:
        planes, own = plan.blocks[run.block].planes, joined[run.block]
        if not own:
            yield run
        elif run.left == 0:  # both runs of the block become one: self and first of each pair, self again and partners
            count = (planes + own) // 2
            yield Run(run.block, 0, count, run.out, count, False)


def _mix(plan: Plan, joined: Sequence[int], constants: _Constants) -> list[int]:
    """Where the whole mix matrices lie."""
    if plan.is_diagonal:
        return [-1] * 4
    symmetric, antisymmetric = plan.symmetric, plan.antisymmetric
    # A joined product has two planes that share the gradient.
    block_of = {out: block for block, _, _, out in plan.products}
    half = [Fraction(1, 2) if own and joined[block_of[o]] else 1 for o, own in enumerate(plan.self_paired)]
    adjoint, adjoint_anti = (
        tuple(tuple(value * scale for value in row) for row, scale in zip(plan.adjoint(matrix), half, strict=True))
        for matrix in (symmetric, antisymmetric)
    )
    # Lag 0 is symmetric.
    matrices = symmetric, antisymmetric[1:], adjoint, tuple(row[1:] for row in adjoint_anti)
    return [constants.add(matrix) for matrix in matrices]


@lru_cache(maxsize=1024)
def lower(plan: Plan, dtype: torch.dtype, device: torch.device | str = "cpu") -> Lowered:
    """The plan for weights that are computed in ``dtype`` on ``device``."""
    constants = _Constants()
    joined = [_joins(plan, index) for index in range(len(plan.blocks))]
    column = plan.side == "column"
    layout = [plan.groups, column, plan.is_flat, plan.outputs, len(plan.lags), plan.offset]
    layout += _mix(plan, joined, constants)
    layout.append(len(plan.blocks))
    for block, own in zip(plan.blocks, joined, strict=True):
        count = (block.planes + own) // 2
        order = [*range(count), *range(own), *range(count, block.planes)]
        layout += [len(order), block.taps, block.residues]
        layout.append(constants.add(tuple(block.evaluation[plane] for plane in order)))
        layout.append(len(block.factors))
        for scheme in block.factors:
            layout += _axis(scheme, constants)
        layout.append(len(block.plane_of))
        layout += [order.index(plane) for plane in block.plane_of]
        layout += [count + plane if plane < own else -1 for plane in block.plane_of]
        layout.append(0 if plan.is_diagonal else len(block.output_of))
        if not plan.is_diagonal:
            layout += [
                3 * out + (2 if plan.self_paired[out] else int(transposed)) for out, transposed in block.output_of
            ]
            layout += _lag_of(plan, block)
        layout += [tap for residue in block.sources for tap in residue]
    runs = list(_runs(plan, joined))
    layout.append(len(runs))
    for run in runs:
        layout += [run.block, run.left, run.right, run.out, run.count, run.summed]
    numbers = torch.tensor(layout, dtype=torch.int64)
    return Lowered(numbers, numbers.to(device), torch.tensor(constants.values, dtype=torch.float64).to(device, dtype))


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


def run_buckets(weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients by the compiled ops; one call serves all weights of one plan, dtype and memory layout."""
    ops = torch.ops.ocnn_fused
    buckets: dict[tuple[Plan, torch.dtype, tuple[int, ...]], list[int]] = {}
    for index, (weight, plan) in enumerate(zip(weights, plans, strict=True)):
        buckets.setdefault((plan, weight.dtype, weight.stride()), []).append(index)
    losses, grads = list(weights), list(weights)
    for (plan, dtype, _), members in buckets.items():
        some = [weights[index] for index in members]
        if plan.small:
            some_losses, some_grads = ops.execute_small.default(some, *lower_small(plan), with_grad)
        else:
            lowered = lower(plan, accumulation_dtype(dtype), some[0].device)
            some_losses, some_grads = ops.execute_plan.default(some, *lowered, with_grad)
        for position, index in enumerate(members):
            losses[index] = some_losses[position]
            if with_grad:
                grads[index] = some_grads[position]
    return losses, grads if with_grad else []
