"""Plans as device-side tables: one row per block, output, product, gradient and term, and a list of work items.

Built on the host from shapes, strides and plans alone, so one set of tables serves every call with the same layers:
the weights' addresses are a tensor of their own, and workspace and gradients are given by offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

import torch

from ...plan import Block, Matrix, Plan
from . import fields
from .config import MIX_SIZES, Config
from .fields import BlockRow, GradientRow, LossRow, MixRow, OutputRow, ProductRow, SmallRow, TermRow, Tile

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

STAGES = ("evaluate", "gram", "mix", "apply", "gather")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


@dataclass(frozen=True)
class Layout:
    """What the tables depend on of one weight. ``aligned`` says whether it begins on a 16-byte boundary."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    @classmethod
    def of(cls, weight: torch.Tensor) -> Layout:
        return cls(tuple(weight.shape), tuple(weight.stride()), weight.dtype, weight.data_ptr() % 16 == 0)

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


class Planes(NamedTuple):
    """Where the planes of one block (or their gradients) lie: in the workspace, or in the weight itself."""

    owner: int
    base_bytes: int
    itemsize: int
    plane_offsets: tuple[int, ...]
    group_stride: int
    row_stride: int

    def at(self, plane: int, group: int) -> int:
        """Byte offset of one group's matrix."""
        return self.base_bytes + (self.plane_offsets[plane] + group * self.group_stride) * self.itemsize


def _planes_in_place(layout: Layout, plan: Plan, block: Block) -> tuple[int, ...] | None:
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
    width = prod(layout.shape[1:])
    return (
        plan.is_flat
        and layout.aligned
        and layout.filters_are_dense
        and width % _ALIGN == 0
        and layout.row_stride % _ALIGN == 0
    )


@dataclass(frozen=True)
class Tables:
    """Everything a launch needs besides addresses; ``tiles`` holds the stages' work items one after another."""

    table: torch.Tensor  # int64
    constants: torch.Tensor  # float32
    tiles: torch.Tensor  # int32, (items, 4)
    ends: tuple[int, int, int, int, int]
    workspace_bytes: int
    partials_bytes: int  # where the partial losses begin
    loss_rows: int
    count: int
    grad_layouts: tuple[Layout, ...]
    grad_bytes: tuple[int, ...]  # where each gradient begins, of those that are wanted
    grads_bytes: int
    multiply_adds: int  # of the products, tiles padded to full size

    def stage(self, name: str) -> tuple[int, int]:
        index = STAGES.index(name)
        return (self.ends[index - 1] if index else 0), self.ends[index]


def build_tables(
    layouts: Sequence[Layout],
    plans: Sequence[Plan],
    grads: Sequence[bool],
    plane_dtype: torch.dtype,
    config: Config,
    device: torch.device,
) -> Tables:
    """Tables of one call; gradients of the weights marked in ``grads``, planes of ``plane_dtype``, tiles of ``config``.

    A weight without a gradient has neither work items of apply and gather nor memory for them.
    """
    builder = _Builder(plane_dtype, config)
    for index, (layout, plan, wanted) in enumerate(zip(layouts, plans, grads, strict=True)):
        builder.add(index, layout, plan, wanted)
    return builder.finish(device)


class _Builder:
    def __init__(self, plane_dtype: torch.dtype, config: Config) -> None:
        self.plane_dtype = plane_dtype
        self.config = config
        self.table: list[int] = []
        self.constants: list[float] = []
        self.tiles: dict[str, list[tuple[int, list[Tile]]]] = {stage: [] for stage in STAGES}
        self.losses: list[LossRow] = []
        self.workspace_bytes = 0
        self.slots = 0
        self.grad_layouts: list[Layout] = []
        self.grad_bytes: list[int] = []
        self.grads_bytes = 0
        self.multiply_adds = 0
        self._matrices: dict[tuple[Matrix, int, int], int] = {}

    # -- storage -------------------------------------------------------------------------------------------------------

    def write(self, row: Iterable[int]) -> int:
        """Append a row; returns its index."""
        index = len(self.table)
        self.table.extend(row)
        return index

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

    def schedule(self, stage: str, cost: int, tiles: Iterable[tuple[int, int, int]], with_loss: bool = False) -> None:
        """Work items of one row, all of about one cost; those that compute a loss get a slot each."""
        items = []
        for row, first, second in tiles:
            items.append(Tile(row, first, second, self.slots if with_loss else 0))
            self.slots += with_loss
        self.tiles[stage].append((cost, items))

    # -- one weight ----------------------------------------------------------------------------------------------------

    def add(self, index: int, layout: Layout, plan: Plan, wanted: bool) -> None:
        grad_layout, first_slot = layout.for_grad(), self.slots
        self.grad_layouts.append(grad_layout)
        self.grad_bytes.append(self.grads_bytes)
        self.grads_bytes += round_up(grad_layout.bytes, _REGION_BYTES) if wanted else 0
        if plan.small:
            self.add_small(index, layout, grad_layout, plan, wanted)
        else:
            self.add_products(index, layout, grad_layout, plan, wanted)
        self.losses.append(LossRow(first_slot, self.slots, plan.offset))

    def add_products(self, index: int, layout: Layout, grad_layout: Layout, plan: Plan, wanted: bool) -> None:
        side, stride = plan.work_rows, round_up(plan.work_rows, _ALIGN)
        outputs = self.reserve(plan.outputs * plan.groups * side * stride)
        planes, gradients = [], []
        for block in plan.blocks:
            stored, stored_gradients = self.add_block(index, layout, grad_layout, plan, block, wanted)
            planes.append(stored)
            gradients.append(stored_gradients)
        self.add_outputs(index, plan, planes, outputs, stride)
        if not plan.is_diagonal:
            self.add_mix(index, plan, outputs, stride)
        if wanted:
            self.add_gradients(plan, planes, gradients, outputs, stride, layout)

    def add_block(
        self, index: int, layout: Layout, grad_layout: Layout, plan: Plan, block: Block, wanted: bool
    ) -> tuple[Planes, Planes]:
        """Planes and their gradients: in place where weight and gradient allow it, else through evaluate and gather."""
        rows, width, item = plan.rows, block.residues * plan.channels, self.plane_dtype.itemsize
        turned = plan.side == "column" and not plan.is_flat
        if turned:  # stored (side, contraction) like the others
            row_stride, lines = round_up(rows, _ALIGN), width
        else:
            row_stride, lines = round_up(width, _ALIGN), rows
        group_stride = lines * row_stride
        plane_stride = plan.groups * group_stride
        own = tuple(plane * plane_stride for plane in range(block.planes))

        def in_place(where: Layout, owner: int, base: int, offsets: tuple[int, ...]) -> Planes:
            return Planes(owner, base, where.dtype.itemsize, offsets, rows * where.row_stride, where.row_stride)

        planes = gradients = None
        if layout.dtype == self.plane_dtype:
            if _flat_in_place(layout, plan):
                planes = in_place(layout, index, 0, (0,))
                if _flat_in_place(grad_layout, plan) and grad_layout.strides[1:] == layout.strides[1:]:
                    gradients = in_place(grad_layout, index, self.grad_bytes[index], (0,))
            elif (offsets := _planes_in_place(layout, plan, block)) is not None:
                planes = in_place(layout, index, 0, offsets)
        # Columns that lie in the weight's own order can only be gathered by a gradient in the same order.
        reordered = planes is not None and plan.is_flat and gradients is None
        if reordered and _planes_in_place(layout, plan, block) is None:
            planes = None
        if gradients is None and (offsets := _planes_in_place(grad_layout, plan, block)) is not None:
            gradients = in_place(grad_layout, index, self.grad_bytes[index], offsets)

        evaluated, gathered = planes is None, gradients is None and wanted
        if planes is None:
            base = self.reserve(block.planes * plane_stride, item)
            planes = Planes(_WORKSPACE, base, item, own, group_stride, row_stride)
        if gradients is None:
            base = self.reserve(block.planes * plane_stride if wanted else 0)
            gradients = Planes(_WORKSPACE, base, 4, own, group_stride, row_stride)
        if evaluated or gathered:
            padded_taps = round_up(block.taps, _CHUNK)
            row_limit = row_stride if turned else rows
            column_limit = plan.channels if turned else row_stride - (block.residues - 1) * plan.channels
            column_blocks = _blocks(max(plan.channels, column_limit), self.config.columns)
            row = self.write(
                BlockRow(
                    weight=index,
                    row_stride=layout.row_stride,
                    channel_stride=layout.channel_stride,
                    tap_offsets=self.write_taps(layout, block, padded_taps),
                    grad_bytes=self.grad_bytes[index],
                    grad_row_stride=grad_layout.row_stride,
                    grad_channel_stride=grad_layout.channel_stride,
                    grad_tap_offsets=self.write_taps(grad_layout, block, padded_taps),
                    dtype=_DTYPES[layout.dtype],
                    rows=rows,
                    channels=plan.channels,
                    residues=block.residues,
                    planes=block.planes,
                    taps=block.taps,
                    padded_taps=padded_taps,
                    matrix=self.matrix(block.evaluation, round_up(block.planes, _CHUNK), padded_taps),
                    identity=int(_is_identity(block.evaluation)),
                    planes_bytes=planes.base_bytes,
                    gradients_bytes=gradients.base_bytes,
                    plane_stride=plane_stride,
                    group_stride=group_stride,
                    plane_row_stride=1 if turned else row_stride,
                    plane_column_stride=row_stride if turned else 1,
                    row_limit=row_limit,
                    column_limit=column_limit,
                    column_blocks=column_blocks,
                )
            )
            parts = plan.groups * block.residues
            places = _blocks(row_limit, self.config.rows) * column_blocks
            tiles = [(row, part, place) for part in range(parts) for place in range(places)]
            if evaluated:
                self.schedule("evaluate", block.planes * padded_taps, tiles)
            if gathered:
                self.schedule("gather", block.planes * padded_taps, tiles)
        return planes, gradients

    def write_taps(self, layout: Layout, block: Block, padded_taps: int) -> int:
        offsets = layout.tap_offsets
        index = len(self.table)
        for source in block.sources:
            row = [offsets[tap] if tap >= 0 else _ABSENT for tap in source]
            self.write(row + [_ABSENT] * (padded_taps - len(row)))
        return index

    def add_outputs(self, weight: int, plan: Plan, planes: Sequence[Planes], outputs: int, stride: int) -> None:
        side, config = plan.work_rows, self.config
        by_output: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.outputs)]
        for block, left, right, out in plan.products:
            by_output[out].append((block, left, right))
        count = _blocks(side, config.block)
        for out, products in enumerate(by_output):
            kind = fields.STORE
            if plan.is_diagonal:
                kind = fields.RESIDUAL_LAG if out else fields.RESIDUAL_ZERO
            symmetric = plan.self_paired[out]
            lengths = [
                plan.rows if plan.side == "column" else plan.channels * plan.blocks[b].residues for b, *_ in products
            ]
            cost = sum(round_up(length, config.depth) for length in lengths) * config.block**2
            for group in range(plan.groups):
                first = len(self.table)
                for (block, left, right), length in zip(products, lengths, strict=True):
                    where = planes[block]
                    self.write(
                        ProductRow(where.owner, where.at(left, group), where.at(right, group), where.row_stride, length)
                    )
                row = OutputRow(
                    kind=kind.value,
                    weight=weight,
                    output_bytes=outputs + 4 * (out * plan.groups + group) * side * stride,
                    row_stride=stride,
                    side=side,
                    first=first,
                    last=len(self.table),
                    transposed=int(plan.side == "column" and plan.is_flat),
                    symmetric=int(symmetric),
                )
                index = self.write(row)
                tiles = [(index, i, j) for i in range(count) for j in range(i if symmetric else 0, count)]
                self.multiply_adds += cost * len(tiles)
                self.schedule("gram", cost, tiles, with_loss=plan.is_diagonal)

    def add_mix(self, weight: int, plan: Plan, outputs: int, stride: int) -> None:
        side = plan.work_rows
        if len(plan.lags) > plan.outputs:
            raise ValueError(f"{plan!r} has more lags than outputs: the residuals would not fit in their place")
        size = next(size for size in MIX_SIZES if size >= plan.outputs)
        symmetric, antisymmetric = plan.symmetric, plan.antisymmetric
        # The second pass meets residuals, whose sum and difference are twice rs and ra.
        adjoints = (_halved(plan.adjoint(symmetric)), _halved(plan.adjoint(antisymmetric)))
        stacked = tuple(
            row
            for matrix in (symmetric, antisymmetric, *adjoints)
            for row in _padded(tuple(zip(*matrix, strict=True)), size)
        )
        row = MixRow(
            weight=weight,
            outputs_bytes=outputs,
            output_stride=plan.groups * side * stride,
            row_stride=stride,
            side=side,
            outputs=plan.outputs,
            lags=len(plan.lags),
            size=size,
            matrices=self.matrix(stacked, 4 * size, size),
        )
        count = _blocks(stride, 16 if size == 16 else 8)
        for group in range(plan.groups):
            index = self.write(row._replace(outputs_bytes=outputs + 4 * group * side * stride))
            self.schedule("mix", 1, [(index, i, j) for i in range(count) for j in range(i, count)], with_loss=True)

    def add_gradients(
        self,
        plan: Plan,
        planes: Sequence[Planes],
        gradients: Sequence[Planes],
        outputs: int,
        stride: int,
        layout: Layout,
    ) -> None:
        side, config = plan.work_rows, self.config
        swapped = plan.side == "column" and plan.is_flat
        terms: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        for block, left, right, out in plan.products:
            terms.setdefault((block, left), []).append((out, right, False))
            if left != right:
                terms.setdefault((block, right), []).append((out, left, True))
        for (block, plane), of_plane in sorted(terms.items()):
            where, target = planes[block], gradients[block]
            width = plan.blocks[block].residues * plan.channels
            columns = round_up(plan.rows if plan.side == "column" and not swapped else width, _ALIGN)
            rows = plan.rows if swapped else side
            cost = len(of_plane) * round_up(side, config.depth) * config.block**2
            for group in range(plan.groups):
                first = len(self.table)
                for out, other, transposed in of_plane:
                    y = (_WORKSPACE, outputs + 4 * (out * plan.groups + group) * side * stride, stride)
                    v = (where.owner, where.at(other, group), where.row_stride)
                    if swapped:
                        self.write(TermRow(fields.SWAPPED.value, *v, *y, side))
                    else:
                        mode = fields.TRANSPOSED if transposed else fields.PLAIN
                        self.write(TermRow(mode.value, *y, *v, side))
                in_grads = target.owner != _WORKSPACE
                row = GradientRow(
                    small=0,
                    in_grads=int(in_grads),
                    target_bytes=target.at(plane, group),
                    row_stride=target.row_stride,
                    dtype=_DTYPES[layout.dtype if in_grads else torch.float32],
                    rows=rows,
                    columns=columns,
                    first=first,
                    last=len(self.table),
                )
                index = self.write(row)
                tiles = [
                    (index, i, j)
                    for i in range(_blocks(rows, config.block))
                    for j in range(_blocks(columns, config.block))
                ]
                self.multiply_adds += cost * len(tiles)
                self.schedule("apply", cost, tiles)

    def add_small(self, index: int, layout: Layout, grad_layout: Layout, plan: Plan, wanted: bool) -> None:
        """Pairs of taps per lag for the residuals, and per tap its terms ``sum_v Y_(u - v) K_v`` for the gradient."""
        taps, grad_taps = layout.tap_offsets, grad_layout.tap_offsets
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(plan.outputs)]
        terms: list[list[tuple[int, int, int]]] = [[] for _ in taps]
        for block, left, right, out in plan.products:
            for source in plan.blocks[block].sources:
                u, v = source[left], source[right]
                pairs[out].append((taps[u], taps[v]))
                terms[u].append((taps[v], out, 0))
                if u != v:
                    terms[v].append((taps[u], out, 1))
        pair_ranges = [(begin, len(self.table)) for begin, _ in ((self.write(sum(lag, ())), None) for lag in pairs)]
        term_ranges = []
        for tap, of_tap in enumerate(terms):
            begin = self.write(number for term in of_tap for number in term)
            term_ranges.append((begin, len(self.table), grad_taps[tap]))
        entries = plan.groups * plan.rows**2
        row = SmallRow(
            kind=fields.SMALL.value,
            weight=index,
            row_stride=layout.row_stride,
            channel_stride=layout.channel_stride,
            dtype=_DTYPES[layout.dtype],
            rows=plan.rows,
            channels=plan.channels,
            groups=plan.groups,
            outputs_bytes=self.reserve(plan.outputs * entries),
            pairs=self.write(number for bounds in pair_ranges for number in bounds),
            terms=self.write(number for bounds in term_ranges for number in bounds),
            grad_bytes=self.grad_bytes[index],
            grad_row_stride=grad_layout.row_stride,
            grad_channel_stride=grad_layout.channel_stride,
        )
        where, lanes = self.write(row), self.config.lanes
        for lag, of_lag in enumerate(pairs):
            tiles = [(where, lag, place) for place in range(_blocks(entries, lanes))]
            self.schedule("gram", lanes * len(of_lag) * plan.channels, tiles, with_loss=True)
        elements = plan.groups * plan.rows * plan.channels
        for tap, of_tap in enumerate(terms if wanted else ()):
            tiles = [(where, tap, place) for place in range(_blocks(elements, lanes))]
            self.schedule("apply", lanes * len(of_tap) * plan.rows, tiles)

    # -- all weights ---------------------------------------------------------------------------------------------------

    def finish(self, device: torch.device) -> Tables:
        """Longest items first, so that no program begins a long one when the others are done."""
        items: list[Tile] = []
        ends = []
        for stage in STAGES:
            for _, tiles in sorted(self.tiles[stage], key=lambda entry: -entry[0]):
                items += tiles
            ends.append(len(items))
        loss_rows = len(self.table)
        for row in self.losses:
            self.write(row)
        partials = self.reserve(self.slots)
        return Tables(
            table=_to_device(self.table, torch.int64, device),
            constants=_to_device(self.constants or [0.0], torch.float32, device),
            tiles=_to_device(items, torch.int32, device),
            ends=tuple(ends),  # type: ignore[arg-type]
            workspace_bytes=self.workspace_bytes,
            partials_bytes=partials,
            loss_rows=loss_rows,
            count=len(self.losses),
            grad_layouts=tuple(self.grad_layouts),
            grad_bytes=tuple(self.grad_bytes),
            grads_bytes=self.grads_bytes,
            multiply_adds=self.multiply_adds,
        )


def _is_identity(matrix: Matrix) -> bool:
    return len(matrix) == len(matrix[0]) and all(
        value == int(r == c) for r, row in enumerate(matrix) for c, value in enumerate(row)
    )


def _halved(matrix: Matrix) -> Matrix:
    return tuple(tuple(value / 2 for value in row) for row in matrix)


def _padded(matrix: Matrix, size: int) -> Matrix:
    rows = [(*row, *(Fraction(0) for _ in range(size - len(row)))) for row in matrix]
    return (*rows, *((Fraction(0),) * size for _ in range(size - len(rows))))


def _to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copied without waiting: from pinned memory where there is a GPU."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
