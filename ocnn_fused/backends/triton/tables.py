"""Plans as device-side tables: one row per block, output, product, gradient and term, and a list of work items.

Built on the host from shapes, strides and plans alone, so one set of tables serves every call with the same layers:
the weights' addresses are a tensor of their own, and workspace and gradients are given by offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, product
from math import prod
from typing import NamedTuple

import torch

from ...plan import Block, Matrix, Plan
from ...problem import FREE, OFF_DIAGONAL, Precision
from ..model import split_into_passes
from . import fields
from .config import MIX_SIZES, Config
from .fields import (
    BlockRow,
    GradientRow,
    LossRow,
    MixRow,
    OutputRow,
    PassRow,
    ProductRow,
    SmallRow,
    SquaresRow,
    TargetRow,
    TermRow,
    Tile,
)

_CHUNK, _ALIGN = fields.CHUNK.value, fields.ALIGN.value
_DTYPES = {
    torch.float32: fields.FLOAT32.value,
    torch.float16: fields.FLOAT16.value,
    torch.bfloat16: fields.BFLOAT16.value,
}
_WORKSPACE = -1
_REGION_BYTES = 256
# Offset of a tap that is not there: negative after any element's offset is added.
_ABSENT = -(1 << 62)

#: Element offsets of matrices, one per plane.
Offsets = tuple[int, ...]

#: The five stages; before them the sums that free targets are made of.
STAGES = ("squares", "evaluate", "gram", "mix", "apply", "gather")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pieces(length: int, size: int) -> int:
    return -(-length // size)


class Layout(NamedTuple):
    """What the tables depend on of one weight. ``aligned`` says whether it begins on a 16-byte boundary.

    A tuple, since layouts are compared at every call.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, weight: torch.Tensor) -> Layout:
        return cls(weight.shape, weight.stride(), weight.dtype, weight.data_ptr() % 16 == 0)

    def for_grad(self) -> Layout:
        """The gradient has the memory format that ``empty_like`` gives it, and begins on a boundary of its own."""
        weight = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return Layout(self.shape, tuple(torch.empty_like(weight).stride()), self.dtype, True)

    @property
    def row_stride(self) -> int:
        return self.strides[0]

    @property
    def channel_stride(self) -> int:
        return self.strides[1]

    @property
    def tap_offsets(self) -> list[int]:
        """Element offset of every tap, in row-major order of the taps."""
        offsets = [0]
        for size, stride in zip(self.shape[2:], self.strides[2:], strict=True):
            offsets = [offset + u * stride for offset in offsets for u in range(size)]
        return offsets

    @property
    def bytes(self) -> int:
        """Extent in memory; the strides of a gradient leave no holes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def filters_are_dense(self) -> bool:
        """The weights of one filter fill a stretch of memory, in whatever order."""
        expected = 1
        for stride, size in sorted(zip(self.strides[1:], self.shape[1:], strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class _Weight:
    """One weight of the call: how its loss is computed, and where it and its gradient lie."""

    index: int
    plan: Plan
    layout: Layout
    grad_layout: Layout
    grad_bytes: int
    wanted: bool  # its gradient
    targets: int  # index of the first group's TargetRow, the others follow

    @property
    def columns(self) -> dict[str, int]:
        """What every row has that reads the weight itself."""
        layout, grad_layout = self.layout, self.grad_layout
        shape = {"rows": self.plan.rows, "channels": self.plan.channels, "dtype": _DTYPES[layout.dtype]}
        strides = {"row_stride": layout.row_stride, "channel_stride": layout.channel_stride}
        grad = {"grad_row_stride": grad_layout.row_stride, "grad_channel_stride": grad_layout.channel_stride}
        return {"weight": self.index, "grad_bytes": self.grad_bytes, **shape, **strides, **grad}


class _Storage(NamedTuple):
    """Strides of a block's planes in the workspace: matrices with padded rows, one per plane and group."""

    turned: bool  # weights lie (channel, row), so that every side's planes are stored (side, contraction)
    row_stride: int
    group_stride: int
    plane_stride: int

    @classmethod
    def of(cls, plan: Plan, block: Block) -> _Storage:
        width = block.residues * plan.channels
        turned = plan.side == "column" and not plan.is_flat
        lines, length = (width, plan.rows) if turned else (plan.rows, width)
        row_stride = round_up(length, _ALIGN)
        return cls(turned, row_stride, lines * row_stride, plan.groups * lines * row_stride)


def workspace_of(plan: Plan, plane_itemsize: int, with_grad: bool) -> int:
    """Bytes that a plan takes of the workspace at most: less where planes lie in the weight or its gradient."""
    if plan.small:
        return 4 * plan.outputs * plan.groups * plan.rows**2
    side = plan.work_rows
    planes = sum(block.planes * _Storage.of(plan, block).plane_stride for block in plan.blocks)
    outputs = plan.outputs * plan.groups * side * round_up(side, _ALIGN)
    return 4 * outputs + planes * (plane_itemsize + (4 if with_grad else 0))


def passes_of(
    plans: Sequence[Plan], grads: Sequence[bool], precision: Precision, workspace_limit: int
) -> tuple[range, ...]:
    """Places of neighbouring weights that are computed together, within the limit of the workspace."""
    itemsize = 2 if precision == "bf16" else 4
    sizes = [workspace_of(plan, itemsize, wanted) for plan, wanted in zip(plans, grads, strict=True)]
    return split_into_passes(sizes, workspace_limit)


class Planes(NamedTuple):
    """Where the planes of one block (or their gradients) lie: in the workspace, or in the weight itself."""

    owner: int
    base_bytes: int
    itemsize: int
    plane_offsets: Offsets
    group_stride: int
    row_stride: int

    def at(self, plane: int, group: int) -> int:
        """Byte offset of one group's matrix."""
        return self.base_bytes + (self.plane_offsets[plane] + group * self.group_stride) * self.itemsize


class _Outputs(NamedTuple):
    """Where the outputs of one weight lie in the workspace: float32 matrices with padded rows, one per group."""

    base_bytes: int
    groups: int
    side: int
    row_stride: int

    @property
    def output_stride(self) -> int:
        return self.groups * self.side * self.row_stride

    def at(self, out: int, group: int) -> int:
        """Byte offset of one group's matrix."""
        return self.base_bytes + 4 * (out * self.output_stride + group * self.side * self.row_stride)


class _Term(NamedTuple):
    """A product of the gradient: an output, or its transpose, times a plane."""

    out: int
    plane: int
    transposed: bool

    def row(self, planes: Planes, outputs: _Outputs, group: int, swapped: bool) -> TermRow:
        y = (_WORKSPACE, outputs.at(self.out, group), outputs.row_stride)
        v = (planes.owner, planes.at(self.plane, group), planes.row_stride)
        if swapped:
            return TermRow(fields.SWAPPED.value, *v, *y, outputs.side)
        mode = fields.TRANSPOSED if self.transposed else fields.PLAIN
        return TermRow(mode.value, *y, *v, outputs.side)


def _offsets_in_place(
    weight: _Weight, block: Block, plane_dtype: torch.dtype | None
) -> tuple[Offsets | None, Offsets | None]:
    """Offsets of a block's planes in the weight and of their gradients in its gradient, None where they are copied.

    Columns in the weight's own order serve only if those of the gradient are in the same order.
    """
    plan, layout, grad_layout = weight.plan, weight.layout, weight.grad_layout
    gradients = _planes_in_place(grad_layout, plan, block)
    if layout.dtype != plane_dtype:
        return None, gradients
    same_order = layout.strides[1:] == grad_layout.strides[1:]
    if same_order and _flat_in_place(layout, plan) and _flat_in_place(grad_layout, plan):
        return (0,), (0,)
    return _planes_in_place(layout, plan, block), gradients


def _planes_in_place(layout: Layout, plan: Plan, block: Block) -> Offsets | None:
    """Element offsets of the planes of an identity evaluation if the weight holds them as aligned matrices, else None.

    A plane is a matrix of rows ``i`` and columns ``(r, c)``: channels must be neighbours, and residues too.
    """
    width = block.residues * plan.channels
    if plan.algorithm != "direct" or (plan.side == "column" and not plan.is_flat) or width % _ALIGN:
        return None
    if not layout.aligned or layout.row_stride % _ALIGN or (plan.channels > 1 and layout.channel_stride != 1):
        return None
    taps, offsets = layout.tap_offsets, []
    for plane in range(block.planes):
        sources = [source[plane] for source in block.sources]
        if any(tap < 0 or taps[tap] != taps[sources[0]] + r * plan.channels for r, tap in enumerate(sources)):
            return None
        offsets.append(taps[sources[0]])
    return None if any(offset % _ALIGN for offset in offsets) else tuple(offsets)


def _flat_in_place(layout: Layout, plan: Plan) -> bool:
    """The weight itself is the one plane of a lag-0 plan, in whatever order its columns lie."""
    fits = prod(layout.shape[1:]) % _ALIGN == 0 and layout.row_stride % _ALIGN == 0
    return plan.is_flat and fits and layout.aligned and layout.filters_are_dense


@dataclass(frozen=True)
class Tables:
    """Everything a launch needs besides addresses; ``tiles`` holds the work items, pass by pass and stage by stage."""

    table: torch.Tensor  # int64
    constants: torch.Tensor  # float32
    tiles: torch.Tensor  # int32, (items, 4)
    passes: tuple[PassRow, ...]
    pass_rows: int  # index in the table of the same
    workspace_bytes: int
    partials_bytes: int  # where the partial losses begin
    loss_rows: int
    count: int
    grad_layouts: tuple[Layout, ...]
    grad_bytes: tuple[int, ...]  # where each gradient begins, of those that are wanted
    grads_bytes: int
    multiply_adds: int  # of the products, tiles padded to full size


def build_tables(
    layouts: Sequence[Layout],
    plans: Sequence[Plan],
    grads: Sequence[bool],
    plane_dtype: torch.dtype,
    config: Config,
    device: torch.device,
    rounded: bool = False,
    passes: Sequence[range] | None = None,
) -> Tables:
    """Tables of one call; gradients of the weights marked in ``grads``, planes of ``plane_dtype``, tiles of ``config``.

    Where planes are ``rounded`` (to TF32), no weight serves as its own. A weight without a gradient has neither work
    items of apply and gather nor memory for them. ``passes`` are the places of the weights that share the workspace,
    all of them by default.
    """
    builder = _Builder(plane_dtype, config, rounded)
    for places in passes or [range(len(plans))]:
        for index in places:
            builder.add(index, layouts[index], plans[index], grads[index])
        builder.finish_pass()
    return builder.finish(device)


class _Items(NamedTuple):
    """Work items of one row of one weight, each of about the same cost."""

    cost: int
    weight: int
    tiles: list[Tile]


class _Builder:
    def __init__(self, plane_dtype: torch.dtype, config: Config, rounded: bool) -> None:
        self.plane_dtype = plane_dtype
        self.rounded = rounded
        self.config = config
        self.table: list[int] = []
        self.constants: list[float] = []
        self.tiles: dict[str, list[_Items]] = {stage: [] for stage in STAGES}  # of this pass
        self.finished: list[Tile] = []  # of those before it
        self.passes: list[PassRow] = []
        self.adding = 0  # the weight whose work is scheduled
        self.losses: list[LossRow] = []
        self.workspace_bytes = 0  # of this pass
        self.largest_workspace = 0
        self.slots = 0
        self.weights: list[_Weight] = []
        self.grads_bytes = 0
        self.multiply_adds = 0
        self._matrices: dict[tuple[Matrix, int, int], int] = {}

    # -- storage -------------------------------------------------------------------------------------------------------

    def write(self, row: Iterable[int]) -> int:
        """Append a row; returns its index."""
        index = len(self.table)
        self.table.extend(row)
        return index

    def write_all(self, rows: Iterable[Iterable[int]]) -> tuple[int, int]:
        """Append rows; returns where they begin and end."""
        begin = self.write(number for row in rows for number in row)
        return begin, len(self.table)

    def reserve(self, elements: int, itemsize: int = 4) -> int:
        """Byte offset of a new region of the workspace."""
        begin = self.workspace_bytes
        self.workspace_bytes += round_up(elements * itemsize, _REGION_BYTES)
        return begin

    def matrix(self, matrix: Matrix, rows: int, columns: int) -> int:
        """Index in the constants of a zero-padded matrix, each entry rounded once from its exact value."""
        key = (matrix, rows, columns)
        if key not in self._matrices:
            self._matrices[key] = len(self.constants)
            for r in range(rows):
                row = matrix[r] if r < len(matrix) else ()
                self.constants += [float(row[c]) if c < len(row) else 0.0 for c in range(columns)]
        return self._matrices[key]

    def schedule(
        self, stage: str, row: int, cost: int, places: Iterable[tuple[int, int]], with_loss: bool = False
    ) -> int:
        """Work items of one row, all of about one cost, and their number; those that compute a loss get a slot each."""
        items = []
        for first, second in places:
            items.append(Tile(row, first, second, self.slots if with_loss else 0))
            self.slots += with_loss
        self.tiles[stage].append(_Items(cost, self.adding, items))
        return len(items)

    # -- one weight ----------------------------------------------------------------------------------------------------

    def add(self, index: int, layout: Layout, plan: Plan, wanted: bool) -> None:
        self.check_reach(layout)
        self.adding = index
        targets = self.add_targets(index, layout, plan)
        first_slot = self.slots
        weight = _Weight(index, plan, layout, layout.for_grad(), self.grads_bytes, wanted, targets)
        self.weights.append(weight)
        self.grads_bytes += round_up(weight.grad_layout.bytes, _REGION_BYTES) if wanted else 0
        if plan.small:
            self.add_small(weight)
        else:
            self.add_products(weight)
        self.losses.append(LossRow(first_slot, self.slots, plan.offset // plan.groups, plan.groups, targets))

    def add_targets(self, index: int, layout: Layout, plan: Plan) -> int:
        """One row per group, or one for all tiny groups; and the sums of squares that free ones are made of."""
        free, ignored = plan.target == FREE, plan.target == OFF_DIAGONAL
        value = _float_bits(1 / plan.rows if free else plan.target)
        if not free or plan.small:
            rows = [TargetRow(value, int(ignored), int(free), 0, 0)] * (1 if plan.small else plan.groups)
            return self.write_all(rows)[0]
        taps = layout.tap_offsets
        tap_offsets, elements = self.write(taps), plan.rows * plan.channels * len(taps)
        rows = []
        for group in range(plan.groups):
            row = SquaresRow(
                weight=index,
                dtype=_DTYPES[layout.dtype],
                first_row=group * plan.rows,
                row_stride=layout.row_stride,
                channel_stride=layout.channel_stride,
                channels=plan.channels,
                taps=len(taps),
                tap_offsets=tap_offsets,
                elements=elements,
            )
            first = self.slots
            pieces = range(_pieces(elements, self.config.lanes * fields.SQUARES.value))
            self.schedule("squares", self.write(row), 1, product(pieces, [0]), with_loss=True)
            rows.append(TargetRow(value, 0, 1, first, self.slots))
        return self.write_all(rows)[0]

    def check_reach(self, layout: Layout) -> None:
        """Offsets within a tile have 32 bits: those within a plane always, since a plane's rows lie together."""
        config = self.config
        rows = min(max(config.rows, config.tile), layout.shape[0])
        columns = min(max(config.columns, config.gathered_columns), layout.shape[1])
        reach = (rows - 1) * layout.row_stride + (columns - 1) * layout.channel_stride
        if reach + max(layout.for_grad().tap_offsets) >= 2**31:
            raise ValueError(
                f"a weight of shape {layout.shape} and strides {layout.strides} reaches too far for the Triton "
                "backend; copy it with .contiguous(), or use backend='torch'"
            )

    def add_products(self, weight: _Weight) -> None:
        plan = weight.plan
        side, stride = plan.work_rows, round_up(plan.work_rows, _ALIGN)
        region = self.reserve(plan.outputs * plan.groups * side * stride)
        outputs = _Outputs(region, plan.groups, side, stride)
        stored = [self.add_block(weight, block) for block in plan.blocks]
        planes, gradients = [one for one, _ in stored], [one for _, one in stored]
        self.add_outputs(weight, planes, outputs)
        if not plan.is_diagonal:
            self.add_mix(weight, outputs)
        if weight.wanted:
            self.add_gradients(weight, planes, gradients, outputs)

    # -- evaluate and gather -------------------------------------------------------------------------------------------

    def add_block(self, weight: _Weight, block: Block) -> tuple[Planes, Planes]:
        """Planes and their gradients: in place where weight and gradient allow it, else through evaluate and gather."""
        offsets, grad_offsets = _offsets_in_place(weight, block, None if self.rounded else self.plane_dtype)
        storage = _Storage.of(weight.plan, block)
        if offsets is None:
            planes = self.new_planes(storage, block.planes, self.plane_dtype.itemsize)
        else:
            planes = self.planes_within(weight, weight.layout, 0, offsets)
        if grad_offsets is None:
            gradients = self.new_planes(storage, block.planes if weight.wanted else 0, 4)
        else:
            gradients = self.planes_within(weight, weight.grad_layout, weight.grad_bytes, grad_offsets)
        copied = {"evaluate": offsets is None, "gather": grad_offsets is None and weight.wanted}
        if stages := [stage for stage, needed in copied.items() if needed]:
            self.add_copies(weight, block, storage, planes, gradients, stages)
        return planes, gradients

    def new_planes(self, storage: _Storage, count: int, itemsize: int) -> Planes:
        offsets = tuple(plane * storage.plane_stride for plane in range(count))
        base = self.reserve(count * storage.plane_stride, itemsize)
        return Planes(_WORKSPACE, base, itemsize, offsets, storage.group_stride, storage.row_stride)

    def planes_within(self, weight: _Weight, layout: Layout, base: int, offsets: Offsets) -> Planes:
        group_stride = weight.plan.rows * layout.row_stride
        return Planes(weight.index, base, layout.dtype.itemsize, offsets, group_stride, layout.row_stride)

    def add_copies(
        self, weight: _Weight, block: Block, storage: _Storage, planes: Planes, gradients: Planes, stages: Sequence[str]
    ) -> None:
        """The row and the work items of evaluate, gather or both."""
        plan, turned, row_stride, config = weight.plan, storage.turned, storage.row_stride, self.config
        padded_taps = round_up(block.taps, _CHUNK)
        row_limit = row_stride if turned else plan.rows
        column_limit = plan.channels if turned else row_stride - (block.residues - 1) * plan.channels
        width = max(plan.channels, column_limit)
        is_identity = _is_identity(block.evaluation)
        by_products = not is_identity and not turned and (block.residues == 1 or plan.channels % _ALIGN == 0)
        # Of fewer taps, sums of outer products take no more instructions, and padding less of the products' time.
        whole_chunk = _CHUNK // 2 < block.taps <= _CHUNK and weight.layout.dtype == torch.float32
        row = BlockRow(
            **weight.columns,
            tap_offsets=self.write_taps(weight.layout, block, padded_taps),
            grad_tap_offsets=self.write_taps(weight.grad_layout, block, padded_taps),
            residues=block.residues,
            planes=block.planes,
            taps=block.taps,
            padded_taps=padded_taps,
            matrix=self.matrix(block.evaluation, round_up(block.planes, _CHUNK), padded_taps),
            transposed_matrix=self.matrix(
                tuple(zip(*block.evaluation, strict=True)), padded_taps, round_up(block.planes, _CHUNK)
            ),
            identity=int(is_identity),
            by_products=int(by_products),
            evaluated_by_products=int(by_products and whole_chunk),
            planes_bytes=planes.base_bytes,
            gradients_bytes=gradients.base_bytes,
            plane_stride=storage.plane_stride,
            group_stride=storage.group_stride,
            plane_row_stride=1 if turned else row_stride,
            plane_column_stride=row_stride if turned else 1,
            row_limit=row_limit,
            column_limit=column_limit,
            width_written=width,
        )
        index = self.write(row)
        parts = range(plan.groups * block.residues)
        for stage in stages:
            columns = config.columns if stage == "evaluate" else config.gathered_columns
            places = range(_pieces(row_limit, config.rows) * _pieces(width, columns))
            self.schedule(stage, index, block.planes * padded_taps, product(parts, places))

    def write_taps(self, layout: Layout, block: Block, padded_taps: int) -> int:
        """Index of the element offsets of all taps, residue after residue."""
        offsets, padding = dict(enumerate(layout.tap_offsets)), [_ABSENT] * (padded_taps - block.taps)
        return self.write_all([offsets.get(tap, _ABSENT) for tap in source] + padding for source in block.sources)[0]

    # -- gram, mix and apply -------------------------------------------------------------------------------------------

    def add_outputs(self, weight: _Weight, planes: Sequence[Planes], outputs: _Outputs) -> None:
        plan = weight.plan
        of_output: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.outputs)]
        for block, left, right, out in plan.products:
            of_output[out].append((block, left, right))
        across = range(_pieces(outputs.side, self.config.tile))
        for out, products in enumerate(of_output):
            kind = fields.STORE
            if plan.is_diagonal:
                kind = fields.RESIDUAL_LAG if out else fields.RESIDUAL_ZERO
            symmetric = plan.self_paired[out]
            width = self.config.tile
            if self.config.wide and kind == fields.STORE and not symmetric:
                kind, width = fields.STORE_WIDE, self.config.wide
            depth = sum(round_up(_contraction(plan, block), self.config.depth) for block, *_ in products)
            cost = depth * self.config.tile * width
            for group in range(plan.groups):
                first = len(self.table)
                for block, left, right in products:
                    where, length = planes[block], _contraction(plan, block)
                    self.write(
                        ProductRow(where.owner, where.at(left, group), where.at(right, group), where.row_stride, length)
                    )
                row = OutputRow(
                    kind=kind.value,
                    weight=weight.index,
                    output_bytes=outputs.at(out, group),
                    row_stride=outputs.row_stride,
                    side=outputs.side,
                    first=first,
                    last=len(self.table),
                    transposed=int(plan.side == "column" and plan.is_flat),
                    symmetric=int(symmetric),
                    target=weight.targets + group * len(TargetRow._fields),
                )
                places = (
                    combinations_with_replacement(across, 2)
                    if symmetric
                    else product(across, range(_pieces(outputs.side, width)))
                )
                self.multiply_adds += cost * self.schedule("gram", self.write(row), cost, places, plan.is_diagonal)

    def add_mix(self, weight: _Weight, outputs: _Outputs) -> None:
        plan = weight.plan
        if len(plan.lags) > plan.outputs:
            raise ValueError(f"{plan!r} has more lags than outputs: the residuals would not fit in their place")
        size = next(size for size in MIX_SIZES if size >= plan.outputs)
        matrices = self.matrix(_mix_matrices(plan, size), 4 * size, size)
        across = range(_pieces(outputs.row_stride, 16 if size == 16 else 8))
        for group in range(plan.groups):
            row = MixRow(
                weight=weight.index,
                outputs_bytes=outputs.at(0, group),
                output_stride=outputs.output_stride,
                row_stride=outputs.row_stride,
                side=outputs.side,
                outputs=plan.outputs,
                lags=len(plan.lags),
                size=size,
                matrices=matrices,
                target=weight.targets + group * len(TargetRow._fields),
            )
            self.schedule("mix", self.write(row), 1, combinations_with_replacement(across, 2), with_loss=True)

    def add_gradients(
        self, weight: _Weight, planes: Sequence[Planes], gradients: Sequence[Planes], outputs: _Outputs
    ) -> None:
        plan, config = weight.plan, self.config
        swapped = plan.side == "column" and plan.is_flat
        rows = plan.rows if swapped else outputs.side
        kind, tile_width = fields.STORE, config.tile
        if config.wide and not plan.is_diagonal:  # whose gradients are never in place
            kind, tile_width = fields.STORE_WIDE, config.wide
        for (block, plane), terms in sorted(_terms_of_planes(plan).items()):
            target = gradients[block]
            in_grads = target.owner != _WORKSPACE
            width = plan.blocks[block].residues * plan.channels
            columns = round_up(plan.rows if plan.side == "column" and not swapped else width, _ALIGN)
            down, across = range(_pieces(rows, config.tile)), range(_pieces(columns, tile_width))
            cost = len(terms) * round_up(outputs.side, config.depth) * config.tile * tile_width
            for group in range(plan.groups):
                first = len(self.table)
                for term in terms:
                    self.write(term.row(planes[block], outputs, group, swapped))
                row = GradientRow(
                    kind=kind.value,
                    weight=weight.index,
                    in_grads=int(in_grads),
                    target_bytes=target.at(plane, group),
                    row_stride=target.row_stride,
                    dtype=_DTYPES[weight.layout.dtype if in_grads else torch.float32],
                    rows=rows,
                    columns=columns,
                    first=first,
                    last=len(self.table),
                )
                self.multiply_adds += cost * self.schedule("apply", self.write(row), cost, product(down, across))

    # -- tiny groups ---------------------------------------------------------------------------------------------------

    def add_small(self, weight: _Weight) -> None:
        """Pairs of taps per lag for the residuals, and per tap its terms ``sum_v Y_(u - v) K_v`` for the gradient."""
        plan, taps, grad_taps = weight.plan, weight.layout.tap_offsets, weight.grad_layout.tap_offsets
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(plan.outputs)]
        terms: list[list[tuple[int, int, int]]] = [[] for _ in taps]
        for block, left, right, out in plan.products:
            for source in plan.blocks[block].sources:
                u, v = source[left], source[right]
                pairs[out].append((taps[u], taps[v]))
                terms[u].append((taps[v], out, 0))
                if u != v:
                    terms[v].append((taps[u], out, 1))
        pair_ranges = [self.write_all(of_lag) for of_lag in pairs]
        term_ranges = [(*self.write_all(of_tap), grad_taps[tap]) for tap, of_tap in enumerate(terms)]
        entries = plan.groups * plan.rows**2
        row = SmallRow(
            kind=fields.SMALL.value,
            **weight.columns,
            groups=plan.groups,
            outputs_bytes=self.reserve(plan.outputs * entries),
            pairs=self.write_all(pair_ranges)[0],
            terms=self.write_all(term_ranges)[0],
            target=weight.targets,
        )
        index, lanes = self.write(row), self.config.lanes
        for lag, of_lag in enumerate(pairs):
            places = product([lag], range(_pieces(entries, lanes)))
            self.schedule("gram", index, lanes * len(of_lag) * plan.channels, places, with_loss=True)
        elements = plan.groups * plan.rows * plan.channels
        for tap, of_tap in enumerate(terms if weight.wanted else ()):
            places = product([tap], range(_pieces(elements, lanes)))
            self.schedule("apply", index, lanes * len(of_tap) * plan.rows, places)

    # -- all weights ---------------------------------------------------------------------------------------------------

    def finish_pass(self) -> None:
        """Products begin with the longest, so that no program begins a long one when the others are done.

        The stages between them, of short items, take the weights in the opposite order: each stage then begins with
        what the one before it did last, which the cache still holds.
        """
        products = sorted(self.tiles["gram"], key=lambda entry: -entry.cost)
        place = {weight: index for index, weight in enumerate(dict.fromkeys(entry.weight for entry in products))}
        ends = [len(self.finished)]
        for stage in STAGES:
            if stage in ("gram", "apply"):
                order = sorted(self.tiles[stage], key=lambda entry: -entry.cost)
            else:
                order = sorted(self.tiles[stage], key=lambda entry: -place[entry.weight])
            self.finished += chain.from_iterable(entry.tiles for entry in order)
            ends.append(len(self.finished))
            self.tiles[stage] = []
        self.passes.append(PassRow(*ends))
        self.largest_workspace = max(self.largest_workspace, self.workspace_bytes)
        self.workspace_bytes = 0

    def finish(self, device: torch.device) -> Tables:
        loss_rows, _ = self.write_all(self.losses)
        pass_rows, _ = self.write_all(self.passes)
        self.workspace_bytes = self.largest_workspace
        partials = self.reserve(self.slots)  # of all passes
        return Tables(
            table=to_device(self.table, torch.int64, device),
            constants=to_device(self.constants or [0.0], torch.float32, device),
            tiles=to_device(self.finished, torch.int32, device),
            passes=tuple(self.passes),
            pass_rows=pass_rows,
            workspace_bytes=self.workspace_bytes,
            partials_bytes=partials,
            loss_rows=loss_rows,
            count=len(self.losses),
            grad_layouts=tuple(weight.grad_layout for weight in self.weights),
            grad_bytes=tuple(weight.grad_bytes for weight in self.weights),
            grads_bytes=self.grads_bytes,
            multiply_adds=self.multiply_adds,
        )


def _contraction(plan: Plan, block: int) -> int:
    """Length of the sums in a block's products."""
    return plan.rows if plan.side == "column" else plan.channels * plan.blocks[block].residues


def _terms_of_planes(plan: Plan) -> dict[tuple[int, int], list[_Term]]:
    """By block and plane, the products in which the plane is the left or the right factor."""
    terms: dict[tuple[int, int], list[_Term]] = {}
    for block, left, right, out in plan.products:
        terms.setdefault((block, left), []).append(_Term(out, right, False))
        if left != right:
            terms.setdefault((block, right), []).append(_Term(out, left, True))
    return terms


def _mix_matrices(plan: Plan, size: int) -> Matrix:
    """The four matrices of the mix on top of each other, each column by column and with ``size`` columns."""
    # The second pass meets residuals, whose sum and difference are twice rs and ra.
    adjoints = (_halved(plan.adjoint(plan.symmetric)), _halved(plan.adjoint(plan.antisymmetric)))
    matrices = [tuple(zip(*matrix, strict=True)) for matrix in (plan.symmetric, plan.antisymmetric, *adjoints)]
    return tuple(row for matrix in matrices for row in (*matrix, *((),) * (size - len(matrix))))


def _is_identity(matrix: Matrix) -> bool:
    return len(matrix) == len(matrix[0]) and all(
        value == int(r == c) for r, row in enumerate(matrix) for c, value in enumerate(row)
    )


def _float_bits(value: float) -> int:
    """A float32 among whole numbers."""
    (bits,) = struct.unpack("i", struct.pack("f", value))
    return int(bits)


def _halved(matrix: Matrix) -> Matrix:
    return tuple(tuple(value / 2 for value in row) for row in matrix)


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copied without waiting: from pinned memory where there is a GPU."""
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
