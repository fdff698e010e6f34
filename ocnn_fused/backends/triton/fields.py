"""Rows of the device-side tables: how the host writes them, and at which index a kernel reads each column.

All rows live in one int64 tensor; a row is named by the index of its first entry. Strides and offsets are in elements,
unless they end in ``_bytes``. An *owner* says what an offset is relative to: a weight's index, or -1 for the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

# Dtypes of weights and gradients.
FLOAT32, FLOAT16, BFLOAT16 = map(tl.constexpr, range(3))

# What gram and apply do with a finished tile; STORE_WIDE: one of more columns than rows, with planes in the workspace.
STORE_WIDE, STORE, RESIDUAL_ZERO, RESIDUAL_LAG, SMALL = map(tl.constexpr, range(5))

# Which gradients are wanted: none, as they are, or times a number for each weight.
NO_GRAD, PLAIN_GRAD, SCALED = map(tl.constexpr, range(3))

# Operands of an apply term: Y V, Y^T V, or V Y where the planes are the weight itself and Y is symmetric.
PLAIN, TRANSPOSED, SWAPPED = map(tl.constexpr, range(3))

#: Entries of the identity-padded matrices that evaluate, gather and mix multiply by, per axis.
CHUNK = tl.constexpr(16)

#: Elements of a weight that a lane squares in one work item.
SQUARES = tl.constexpr(16)

#: Columns of planes and outputs are padded with zeros to a multiple of this, so that 16-byte accesses need no mask.
ALIGN = tl.constexpr(8)


class BlockRow(NamedTuple):
    """One block of one weight, for evaluate and gather: ``V_p = sum_m E[p, m] K[..., m]`` and its transpose."""

    weight: int
    row_stride: int
    channel_stride: int
    tap_offsets: int  # index in the table of (residues, padded taps) offsets; far below zero where there is no tap
    grad_bytes: int
    grad_row_stride: int
    grad_channel_stride: int
    grad_tap_offsets: int
    dtype: int
    rows: int
    channels: int
    residues: int
    planes: int
    taps: int
    padded_taps: int  # also the row length of `matrix`
    matrix: int  # index in the constants of the evaluation matrix, zero-padded to multiples of CHUNK
    transposed_matrix: int  # of the same matrix tap by tap
    identity: int
    by_products: int  # gather may use matrix instructions, if it is compiled with them
    evaluated_by_products: int  # the same for evaluate
    planes_bytes: int
    gradients_bytes: int
    plane_stride: int
    group_stride: int
    plane_row_stride: int
    plane_column_stride: int
    row_limit: int  # rows written, padding included
    column_limit: int  # columns of the last residue written, padding included
    width_written: int  # columns of any residue written, padding included


class OutputRow(NamedTuple):
    """One output of one group, for gram: ``X = sum of V V'^T`` over the products ``[first, last)``."""

    kind: int
    weight: int  # whose loss it belongs to
    output_bytes: int
    row_stride: int
    side: int
    first: int
    last: int
    transposed: int  # planes are stored (contraction, side)
    symmetric: int  # only tiles on and above the diagonal are computed
    target: int  # the group's TargetRow


class ProductRow(NamedTuple):
    """One product of the gram stage: both factors have one owner, one row stride and one contraction length."""

    owner: int
    left_bytes: int
    right_bytes: int
    row_stride: int
    length: int


class MixRow(NamedTuple):
    """All outputs of one group, for mix, in place."""

    weight: int  # whose loss it belongs to
    outputs_bytes: int
    output_stride: int
    row_stride: int
    side: int
    outputs: int
    lags: int
    size: int  # rows and columns of each of the four matrices: 16, 32 or 64
    matrices: int  # index in the constants: symmetric, antisymmetric and half their adjoints, each column by column
    target: int  # the group's TargetRow


class GradientRow(NamedTuple):
    """The gradient of one plane of one group, for apply: the sum over the terms ``[first, last)``."""

    kind: int  # STORE or STORE_WIDE
    weight: int  # whose gradient it is a part of
    in_grads: int  # written straight into the weight's gradient
    target_bytes: int
    row_stride: int
    dtype: int
    rows: int
    columns: int  # padding included
    first: int
    last: int


class TermRow(NamedTuple):
    """One product of the apply stage."""

    mode: int
    left_owner: int
    left_bytes: int
    left_stride: int
    right_owner: int
    right_bytes: int
    right_stride: int
    length: int


class SmallRow(NamedTuple):
    """A weight of tiny groups, one thread per entry. Begins like OutputRow; GradientRow too begins with its kind.

    ``pairs`` lists, per lag, begin and end of its (left, right) tap offsets; ``terms``, per tap, begin and end of its
    (tap offset, output, transposed) triples and the offset of the tap in the gradient.
    """

    kind: int
    weight: int
    row_stride: int
    channel_stride: int
    dtype: int
    rows: int
    channels: int
    groups: int
    outputs_bytes: int
    pairs: int
    terms: int
    grad_bytes: int
    grad_row_stride: int
    grad_channel_stride: int
    target: int  # the TargetRow of all groups; free targets are found by the lanes themselves


class TargetRow(NamedTuple):
    """What the diagonal of lag 0 is compared with in one group of a weight.

    A free target is the sum of squares in slots ``[first, last)`` of the partial sums over the number of filters.
    """

    value: int  # bits of a float32: the target, or by what to multiply the sum
    ignored: int  # the diagonal does not count
    free: int
    first: int
    last: int


class SquaresRow(NamedTuple):
    """One group of a weight with a free target, for the sums of squares: elements of all filters, in pieces."""

    weight: int
    dtype: int
    first_row: int
    row_stride: int
    channel_stride: int
    channels: int
    taps: int
    tap_offsets: int  # index in the table of one offset per tap
    elements: int


class LossRow(NamedTuple):
    """One weight's loss: slots ``[first, last)`` of its partial sums, one per tile, and what its side adds.

    That is ``offset`` times the square of the target, for each of the groups.
    """

    first: int
    last: int
    offset: int
    groups: int
    target: int  # the first group's TargetRow; the others follow


class PassRow(NamedTuple):
    """Where the work items of a pass lie, stage by stage. A pass has some of the weights, and all of the workspace."""

    begin: int
    squares_end: int
    evaluate_end: int
    gram_end: int
    mix_end: int
    apply_end: int
    gather_end: int

    def stage(self, name: str) -> tuple[int, int]:
        """Where the work items of a stage begin and end."""
        place = self._fields.index(f"{name}_end")
        return self[place - 1], self[place]


class Tile(NamedTuple):
    """One work item: the row it belongs to, where in it, and the slot of its partial loss."""

    row: int
    first: int
    second: int
    slot: int


# Kernels read the index of a column, and a row's number of columns, as constants of this module: BlockRow.rows is at
# B_ROWS, and the next LossRow begins L_WIDTH later.
_COLUMNS = {
    "B": BlockRow._fields, "O": OutputRow._fields, "P": ProductRow._fields, "M": MixRow._fields, "L": LossRow._fields,
    "G": GradientRow._fields, "T": TermRow._fields, "S": SmallRow._fields, "I": Tile._fields, "A": TargetRow._fields,
    "Q": SquaresRow._fields, "E": PassRow._fields,
}  # fmt: skip
for _prefix, _names in _COLUMNS.items():
    for _index, _name in enumerate((*_names, "width")):
        globals()[f"{_prefix}_{_name.upper()}"] = tl.constexpr(_index)
