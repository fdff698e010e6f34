"""Plans as flat numbers and tensors, the form in which compiled code takes them (csrc/lowered.h)."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from enum import IntEnum
from fractions import Fraction
from math import cos, pi, prod, sin
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _extension
from ..plan import AnyPlan, Block, FourierPlan, Matrix, Plan, Run, Scheme
from ..problem import Options, flatten_problems
from .device import beside_all_graphs
from .job import Executable, Job, Operand, accumulation_dtype


class Lowered(NamedTuple):
    """What a compiled ``Plan`` is made of (csrc/plan_object.h); see ``read_plan`` in csrc/lowered.h."""

    layout: Tensor  # int64, on the CPU
    tables: Tensor | None  # the same numbers where the weights are
    constants: Tensor | None  # entries of the matrices, in the accumulation dtype, where the weights are


def to_tensor(matrix: Matrix, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Rounded once, from the exact value."""
    rows = [[float(value) for value in row] for row in matrix]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(dtype).to(device)


class _Constants:
    """Collects matrices; ``add`` tells where one begins."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, *matrices: Sequence[Sequence[Fraction | float]]) -> int:
        begin = len(self.values)
        self.values += [float(value) for matrix in matrices for row in matrix for value in row]
        return begin


def _halves(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Even and odd half of a ``(points, span)`` matrix whose rows 1, 2 | 3, 4 | ... mirror each other.

    With ``s_q = x_q + x_(n-1-q)`` and ``d_q`` their difference, the rows of a pair are ``even s + odd d`` and
    ``even s - odd d``; row 0 and a middle column are their own mirror images, and a last row may have no partner.
    """
    span = len(matrix[0])
    firsts = matrix[1::2]
    assert all(tuple(reversed(a)) == b for a, b in zip(firsts, matrix[2::2], strict=False))
    half = Fraction(1, 2)
    even = [matrix[0][: (span + 1) // 2]]
    even += [tuple((row[q] + row[span - 1 - q]) * half for q in range((span + 1) // 2)) for row in firsts]
    # A middle element is counted once in s.
    odd = [tuple((row[q] - row[span - 1 - q]) * half for q in range(span // 2)) for row in firsts]
    return tuple(even), tuple(odd)


def _is_identity(matrix: Matrix) -> bool:
    return all(value == (i == j) for i, row in enumerate(matrix) for j, value in enumerate(row))


def _bits(value: float) -> int:
    """A float64 among whole numbers."""
    (bits,) = struct.unpack("q", struct.pack("d", value))
    return int(bits)


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


class OutputKind(IntEnum):
    """How a block takes an output; the numbers are those of csrc/lowered.h."""

    STORED = 0
    TRANSPOSED = 1
    SYMMETRIC = 2  # it is its own transpose


def _kind(transposed: bool, self_paired: bool) -> OutputKind:
    return OutputKind.SYMMETRIC if self_paired else OutputKind(transposed)


def _lag_of(plan: Plan, block: Block) -> list[int]:
    """For every lag of the block's grid, its place among all lags of the plan, in order; -1 if it is dropped."""
    all_lags = itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in plan.axes))
    index = {lag: position for position, lag in enumerate(all_lags)}
    reach = [len(scheme.mix) // 2 for scheme in block.factors]
    return [index.get(lag, -1) for lag in itertools.product(*(range(-r, r + 1) for r in reach))]


class Pool(NamedTuple):
    """Planes of equal size that lie together: ``where[block][plane]`` is a plane's place, if the block is in it."""

    residues: int
    where: dict[int, list[int]]


class Batches(NamedTuple):
    """The plan's products in as few runs as possible. ``Run.block`` counts pools; outputs are renumbered."""

    pools: list[Pool]
    runs: list[Run]
    output: list[int]  # new number of every output


def batches(plan: Plan) -> Batches:
    """Planes of all blocks of one width become a pool, ordered self-paired, first of each pair, partners: two runs."""
    products: dict[int, list[tuple[int, int, int, int]]] = {}
    for product in plan.products:
        products.setdefault(plan.blocks[product[0]].residues, []).append(product)
    if plan.is_diagonal or len({out for *_, out in plan.products}) < len(plan.products):
        pools = [Pool(block.residues, {index: list(range(block.planes))}) for index, block in enumerate(plan.blocks)]
        return Batches(pools, list(plan.runs), list(range(plan.outputs)))
    pools, runs = [], []
    order: list[int] = []
    for residues, of_pool in products.items():
        own = [product for product in of_pool if product[1] == product[2]]
        pairs = [product for product in of_pool if product[1] != product[2]]
        planes = [(block, left) for block, left, _, _ in own + pairs] + [(block, right) for block, _, right, _ in pairs]
        place = {plane: index for index, plane in enumerate(planes)}
        members = {block: [place[block, p] for p in range(plan.blocks[block].planes)] for block, *_ in of_pool}
        for first, count, partner in ((0, len(own), 0), (len(own), len(pairs), len(own) + len(pairs))):
            if count:
                runs.append(Run(len(pools), first, partner, len(order) + first, count, False))
        pools.append(Pool(residues, members))
        order += [out for *_, out in own + pairs]
    return Batches(pools, runs, [order.index(out) for out in range(plan.outputs)])


def _mix(plan: Plan, output: Sequence[int], constants: _Constants, whole: bool) -> list[int]:
    """Where the whole mix matrices lie: -1 if there is nothing to mix, 0 if nobody looks."""
    if plan.is_diagonal or not whole:
        return [-1 if plan.is_diagonal else 0] * 4
    by_number = sorted(range(plan.outputs), key=output.__getitem__)
    # As floats before the adjoint, which multiplies by powers of two: nothing is rounded twice.
    symmetric, antisymmetric = (
        [[float(value) for value in row] for row in matrix] for matrix in (plan.symmetric, plan.antisymmetric)
    )
    forward = [tuple(tuple(row[o] for o in by_number) for row in m) for m in (symmetric, antisymmetric[1:])]
    adjoint, adjoint_anti = (plan.adjoint(matrix) for matrix in (symmetric, antisymmetric))
    backward = tuple(adjoint[o] for o in by_number), tuple(adjoint_anti[o][1:] for o in by_number)
    return [constants.add(matrix) for matrix in (*forward, *backward)]  # lag 0 has no antisymmetric part


def lower(plan: AnyPlan, dtype: torch.dtype, device: torch.device | str = "cpu", whole: bool = True) -> Lowered:
    """The plan for weights that are computed in ``dtype`` on ``device``.

    The CPU backend transforms axis by axis and does without the ``whole`` matrices, which are far larger.
    """
    if isinstance(plan, FourierPlan):
        return _lower_fourier(plan, dtype)
    numbers, constants = (_small_numbers(plan), None) if plan.small else _numbers(plan, whole)
    layout = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    values = None if constants is None else torch.tensor(constants, dtype=torch.float64, device="cpu").to(dtype)
    return beside_all_graphs(
        torch.device(device), lambda: Lowered(layout, layout.to(device), None if values is None else values.to(device))
    )


def _numbers(plan: Plan, whole: bool) -> tuple[list[int], list[float]]:
    """Layout and constants of a plan with matrix products."""
    constants = _Constants()
    pools, runs, output = batches(plan)
    layout = [plan.groups, plan.side == "column", plan.is_flat, plan.outputs, len(plan.lags), plan.offset]
    layout.append(_bits(plan.target))
    layout += _mix(plan, output, constants, whole)
    layout.append(len(pools))
    for pool in pools:
        layout += [sum(map(len, pool.where.values())), pool.residues]
    layout.append(len(plan.blocks))
    for index, block in enumerate(plan.blocks):
        number = next(number for number, pool in enumerate(pools) if index in pool.where)
        layout += [number, block.planes, block.taps, block.residues]
        layout.append(constants.add(tuple(block.evaluation[p] for p in block.plane_of)) if whole else 0)
        layout.append(len(block.factors))
        for scheme in block.factors:
            layout += _axis(scheme, constants)
        layout += [pools[number].where[index][plane] for plane in block.plane_of]
        on_grid = () if plan.is_diagonal else block.output_of
        layout += [len(on_grid), *(output[out] for out, _ in on_grid)]
        layout += [_kind(transposed, plan.self_paired[out]) for out, transposed in on_grid]
        lag_of = [] if plan.is_diagonal else _lag_of(plan, block)
        layout += [len(lag_of), *lag_of]
        layout += [tap for residue in block.sources for tap in residue]
    layout.append(len(runs))
    for run in runs:
        layout += [run.block, run.left, run.right, run.out, run.count, run.summed]
    return layout, constants.values


def _small_numbers(plan: Plan) -> list[int]:
    """The layout of a plan for small groups, see ``read_small_plan``: pairs of taps by lag, and by tap."""
    by_lag: list[list[tuple[int, int]]] = [[] for _ in range(plan.outputs)]
    for block, left, right, out in plan.products:
        by_lag[out] += [(source[left], source[right]) for source in plan.blocks[block].sources]
    taps = prod(axis.taps for axis in plan.axes)
    by_tap: list[list[tuple[int, int, int]]] = [[] for _ in range(taps)]
    for lag, pairs in enumerate(by_lag):
        for left, right in pairs:
            by_tap[left].append((lag, right, 0))
            by_tap[right].append((lag, left, 1))
    layout = [plan.groups, taps, len(by_lag), sum(map(len, by_lag)), _bits(plan.target)]
    layout += [left for pairs in by_lag for left, _ in pairs]
    layout += [right for pairs in by_lag for _, right in pairs]
    layout += itertools.accumulate(map(len, by_lag), initial=0)
    layout += [number for terms in by_tap for term in terms for number in term]
    layout += itertools.accumulate(map(len, by_tap), initial=0)
    return layout


#: Rows of lanes are padded to this many: kLanes in csrc/cpu/stages.h.
_LANES = 16


def fourier_constants(plan: FourierPlan) -> int:
    """How many numbers the matrices of a Fourier plan have, about."""
    *others, last = sorted(plan.class_taps)
    return 2 * last * (last + _LANES) + sum(taps**2 for taps in others)


def _lower_fourier(plan: FourierPlan, dtype: torch.dtype) -> Lowered:
    """A Fourier plan, for the CPU; see ``FourierPlan`` in csrc/lowered.h."""
    layout = [plan.groups, plan.side == "column", plan.offset, _bits(plan.target), len(plan.axes)]
    tables: list[Tensor] = []
    places: list[int] = []

    def add(*matrices: Tensor) -> None:
        for matrix in matrices:
            places.append(sum(table.numel() for table in tables))
            tables.append(matrix.flatten())

    *others, last = plan.transform_order
    for axis in others:
        taps = plan.class_taps[axis]
        add(*_turns(_from_middle(taps)[: (taps + 1) // 2], _from_middle(2 * taps - 1)[:taps], 2 * taps - 1, dtype))
        layout += [axis, plan.axes[axis].taps, plan.axes[axis].step, *places[-2:]]
    taps = plan.class_taps[last]
    frequencies = 2 * torch.arange(taps, device="cpu", dtype=torch.int32)
    for back in (False, True):
        scale = 8 / prod(plan.sizes) if back else 1.0
        for matrix in _turns(_from_middle(taps)[: (taps + 1) // 2], frequencies, 2 * taps - 1, dtype, scale):
            if back:
                matrix[:, 0] /= 2  # frequency zero has no partner
            add(_padded(matrix.mT if back else matrix))
    layout += [last, plan.axes[last].taps, plan.axes[last].step, -1, -1, *places[-4:]]
    return Lowered(torch.tensor(layout, dtype=torch.int64, device="cpu"), None, torch.cat(tables))


def _from_middle(count: int) -> Tensor:
    """Twice the distances of ``count`` positions from their middle."""
    return 2 * torch.arange(count, device="cpu", dtype=torch.int32) - (count - 1)


def _turns(
    positions: Tensor, waves: Tensor, size: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``scale`` times cosine and sine of ``pi/2 * position * wave / size``.

    They are looked up in one turn, so that nothing as large as the result is in float64.
    """
    turn = [step * (pi / (2 * size)) for step in range(4 * size)]
    steps = positions[:, None] * waves % (4 * size)
    # Not by torch, which wakes its threads for them.
    cosine, sine = ([scale * function(angle) for angle in turn] for function in (cos, sin))
    return (
        torch.tensor(cosine, dtype=dtype, device="cpu")[steps],
        torch.tensor(sine, dtype=dtype, device="cpu")[steps],
    )


def _padded(matrix: Tensor) -> Tensor:
    """Rows of whole vectors."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % _LANES))


def compile_call(jobs: Sequence[Job[AnyPlan]], device: torch.device, options: Options) -> Executable:
    """The call of compiled code, see csrc/call.h: weights of one plan and memory layout are executed together."""
    members: dict[tuple[AnyPlan, Operand], list[int]] = {}
    for index, job in enumerate(jobs):
        members.setdefault((job.plan, job.operand), []).append(index)
    buckets = [
        (places, *lower(plan, accumulation_dtype(operand.dtype), device, device.type != "cpu"), operand.with_grad)
        for (plan, operand), places in members.items()
    ]
    return _extension.module.Call(buckets, *flatten_problems([job.problem for job in jobs]))
