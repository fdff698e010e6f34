"""Plans as compiled code takes them: structs with named fields (csrc/plan.h), and two arrays that they point into."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntEnum
from fractions import Fraction
from math import cos, pi, prod, sin
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _extension
from ..plan import AnyPlan, Block, FourierPlan, Matrix, Plan, Run, Scheme
from .device import beside_all_graphs


class Lowered(NamedTuple):
    """A struct of csrc/plan.h, and the arrays that its positions are in, where the weights are."""

    plan: Any  # BilinearPlan, SmallPlan or FourierPlan of ocnn_fused._C
    tables: Tensor  # int64: index maps
    constants: Tensor  # entries of the matrices, in the accumulation dtype


def to_tensor(matrix: Matrix, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Rounded once, from the exact value."""
    rows = [[float(value) for value in row] for row in matrix]
    return torch.tensor(rows, dtype=torch.float64, device="cpu").to(dtype).to(device)


#: A position that stands for nothing: the identity matrix, or a matrix that nobody reads.
_NOWHERE = -1


class _Constants:
    """Collects the entries of matrices; ``add`` returns where the first begins."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, *matrices: Sequence[Sequence[Fraction | float]]) -> int:
        begin = len(self.values)
        self.values += [float(value) for matrix in matrices for row in matrix for value in row]
        return begin


class _Tables:
    """Collects index maps; ``add`` returns where one begins."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, numbers: Sequence[int]) -> int:
        begin = len(self.numbers)
        self.numbers += numbers
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


def _factor(matrix: Matrix, constants: _Constants) -> int:
    """Position of the halves of a matrix along one axis."""
    return _NOWHERE if _is_identity(matrix) else constants.add(*_halves(matrix))


def _axis(scheme: Scheme, constants: _Constants) -> Any:
    transposed_mix = tuple(zip(*scheme.mix, strict=True))
    return _extension.module.PlanAxis(
        planes=len(scheme.evaluation),
        taps=len(scheme.evaluation[0]),
        evaluation=_factor(scheme.evaluation, constants),
        outputs=len(scheme.partner),
        mix=_factor(transposed_mix, constants),
    )


class OutputKind(IntEnum):
    """How a block takes an output; the numbers are those of csrc/plan.h."""

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


#: Whole mix matrices of a BilinearPlan.
_MIXES = ("symmetric", "antisymmetric", "symmetric_t", "antisymmetric_t")


def _mix(plan: Plan, output: Sequence[int], constants: _Constants, whole: bool) -> dict[str, int]:
    """Positions of the whole mix matrices: nowhere if there is nothing to mix, 0 if nobody reads them."""
    if plan.is_diagonal or not whole:
        return dict.fromkeys(_MIXES, _NOWHERE if plan.is_diagonal else 0)
    by_number = sorted(range(plan.outputs), key=output.__getitem__)
    # As floats before the adjoint, which multiplies by powers of two: nothing is rounded twice.
    symmetric, antisymmetric = (
        [[float(value) for value in row] for row in matrix] for matrix in (plan.symmetric, plan.antisymmetric)
    )
    forward = [tuple(tuple(row[o] for o in by_number) for row in m) for m in (symmetric, antisymmetric[1:])]
    adjoint, adjoint_anti = (plan.adjoint(matrix) for matrix in (symmetric, antisymmetric))
    backward = tuple(adjoint[o] for o in by_number), tuple(adjoint_anti[o][1:] for o in by_number)
    # Lag 0 has no antisymmetric part.
    return {name: constants.add(matrix) for name, matrix in zip(_MIXES, (*forward, *backward), strict=True)}


def lower(plan: AnyPlan, dtype: torch.dtype, device: torch.device | str = "cpu", whole: bool = True) -> Lowered:
    """The plan for weights that are computed in ``dtype`` on ``device``.

    The CPU backend transforms axis by axis and does without the ``whole`` matrices, which are far larger.
    """
    if isinstance(plan, FourierPlan):
        return _lower_fourier(plan, dtype)
    tables, constants = _Tables(), _Constants()
    struct = _small(plan, tables) if plan.small else _bilinear(plan, tables, constants, whole)
    numbers = torch.tensor(tables.numbers, dtype=torch.int64, device="cpu")
    values = torch.tensor(constants.values, dtype=torch.float64, device="cpu").to(dtype)
    return beside_all_graphs(torch.device(device), lambda: Lowered(struct, numbers.to(device), values.to(device)))


def _bilinear(plan: Plan, tables: _Tables, constants: _Constants, whole: bool) -> Any:
    """A plan with matrix products."""
    native = _extension.module
    pools, runs, output = batches(plan)
    mixes = _mix(plan, output, constants, whole)
    blocks = []
    for index, block in enumerate(plan.blocks):
        number = next(number for number, pool in enumerate(pools) if index in pool.where)
        on_grid = () if plan.is_diagonal else block.output_of
        lag_of = [] if plan.is_diagonal else _lag_of(plan, block)
        blocks.append(
            native.PlanBlock(
                pool=number,
                planes=block.planes,
                taps=block.taps,
                residues=block.residues,
                evaluation=constants.add(tuple(block.evaluation[p] for p in block.plane_of)) if whole else 0,
                axes=[_axis(scheme, constants) for scheme in block.factors],
                plane_of=tables.add([pools[number].where[index][plane] for plane in block.plane_of]),
                outputs=len(on_grid),
                output_of=tables.add([output[out] for out, _ in on_grid]),
                output_kind=tables.add([_kind(transposed, plan.self_paired[out]) for out, transposed in on_grid]),
                lags=len(lag_of),
                lag_of=tables.add(lag_of),
                sources=tables.add([tap for residue in block.sources for tap in residue]),
            )
        )
    return native.BilinearPlan(
        groups=plan.groups,
        column=plan.side == "column",
        flat=plan.is_flat,
        outputs=plan.outputs,
        lags=len(plan.lags),
        offset=plan.offset,
        target=plan.target,
        **mixes,
        pools=[native.PlanPool(planes=sum(map(len, pool.where.values())), residues=pool.residues) for pool in pools],
        blocks=blocks,
        runs=[
            native.PlanRun(
                pool=run.block, left=run.left, right=run.right, out=run.out, count=run.count, summed=run.summed
            )
            for run in runs
        ],
    )


def _small(plan: Plan, tables: _Tables) -> Any:
    """A plan for groups too small for matrix products: pairs of taps by lag, and by tap."""
    by_lag: list[list[tuple[int, int]]] = [[] for _ in range(plan.outputs)]
    for block, left, right, out in plan.products:
        by_lag[out] += [(source[left], source[right]) for source in plan.blocks[block].sources]
    taps = prod(axis.taps for axis in plan.axes)
    by_tap: list[list[tuple[int, int, int]]] = [[] for _ in range(taps)]
    for lag, pairs in enumerate(by_lag):
        for left, right in pairs:
            by_tap[left].append((lag, right, 0))
            by_tap[right].append((lag, left, 1))
    return _extension.module.SmallPlan(
        groups=plan.groups,
        taps=taps,
        lags=len(by_lag),
        pairs=sum(map(len, by_lag)),
        target=plan.target,
        left=tables.add([left for pairs in by_lag for left, _ in pairs]),
        right=tables.add([right for pairs in by_lag for _, right in pairs]),
        lag_begin=tables.add(list(itertools.accumulate(map(len, by_lag), initial=0))),
        terms=tables.add([number for terms in by_tap for term in terms for number in term]),
        tap_begin=tables.add(list(itertools.accumulate(map(len, by_tap), initial=0))),
    )


#: Rows of lanes are padded to this many: kLanes in csrc/cpu/stages.h.
_LANES = 16


def fourier_constants(plan: FourierPlan) -> int:
    """How many numbers the matrices of a Fourier plan have, about."""
    *others, last = sorted(plan.class_taps)
    return 2 * last * (last + _LANES) + sum(taps**2 for taps in others)


def _lower_fourier(plan: FourierPlan, dtype: torch.dtype) -> Lowered:
    """A Fourier plan, for the CPU; see ``FourierPlan`` in csrc/plan.h."""
    native = _extension.module
    pieces: list[Tensor] = []

    def add(*matrices: Tensor) -> list[int]:
        positions = []
        for matrix in matrices:
            positions.append(sum(piece.numel() for piece in pieces))
            pieces.append(matrix.flatten())
        return positions

    *others, last = plan.transform_order
    axes = []
    for axis in others:
        taps = plan.class_taps[axis]
        cosine, sine = add(
            *_turns(_from_middle(taps)[: (taps + 1) // 2], _from_middle(2 * taps - 1)[:taps], 2 * taps - 1, dtype)
        )
        of_plan = plan.axes[axis]
        axes.append(native.FourierPlanAxis(axis=axis, taps=of_plan.taps, step=of_plan.step, cosine=cosine, sine=sine))
    taps, of_plan = plan.class_taps[last], plan.axes[last]
    axes.append(native.FourierPlanAxis(axis=last, taps=of_plan.taps, step=of_plan.step, cosine=_NOWHERE, sine=_NOWHERE))
    frequencies = 2 * torch.arange(taps, device="cpu", dtype=torch.int32)
    positions = []
    for back in (False, True):
        scale = 8 / prod(plan.sizes) if back else 1.0
        for matrix in _turns(_from_middle(taps)[: (taps + 1) // 2], frequencies, 2 * taps - 1, dtype, scale):
            if back:
                matrix[:, 0] /= 2  # frequency zero has no partner
            positions += add(_padded(matrix.mT if back else matrix))
    cosine, sine, cosine_back, sine_back = positions
    struct = native.FourierPlan(
        groups=plan.groups,
        column=plan.side == "column",
        offset=plan.offset,
        target=plan.target,
        axes=axes,
        cosine=cosine,
        sine=sine,
        cosine_back=cosine_back,
        sine_back=sine_back,
    )
    return Lowered(struct, torch.empty(0, dtype=torch.int64, device="cpu"), torch.cat(pieces))


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
