"""Rows of the device-side tables: how the host writes them and at which index a kernel reads each entry.

All rows live in one int64 tensor; a row is named by the index of its first entry. Strides and offsets are in elements,
unless they end in ``_bytes``. An *owner* says what an offset is relative to: a weight's index, or -1 for the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

# Dtypes of weights and gradients.
FLOAT32, FLOAT16, BFLOAT16 = map(tl.constexpr, range(3))

# What the gram stage does with a finished tile.
STORE, RESIDUAL_ZERO, RESIDUAL_LAG, SMALL = map(tl.constexpr, range(4))

# Operands of an apply term: Y V, Y^T V, or V Y where the planes are the weight itself and Y is symmetric.
PLAIN, TRANSPOSED, SWAPPED = map(tl.constexpr, range(3))

#: Entries of the identity-padded matrices that evaluate, gather and mix multiply by, per axis.
CHUNK = tl.constexpr(16)

#: Columns of planes and outputs are padded with zeros to a multiple of this, so that 16-byte accesses need no mask.
ALIGN = tl.constexpr(8)


class BlockRow(NamedTuple):
    """One block of one weight, for evaluate and gather: ``V_p = sum_m E[p, m] K[..., m]`` and its transpose."""

    weight: int
    row_stride: int
    channel_stride: int
    tap_offsets: (
        int  # index in the table of (residues, padded taps) offsets; far below zero for a tap that is not there
    )
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
    identity: int
    planes_bytes: int
    gradients_bytes: int
    plane_stride: int
    group_stride: int
    plane_row_stride: int
    plane_column_stride: int
    row_limit: int  # rows written, padding included
    column_limit: int  # columns of the last residue written, padding included
    column_blocks: int


(
    B_WEIGHT, B_ROW_STRIDE, B_CHANNEL_STRIDE, B_TAP_OFFSETS, B_GRAD_BYTES, B_GRAD_ROW_STRIDE, B_GRAD_CHANNEL_STRIDE,
    B_GRAD_TAP_OFFSETS, B_DTYPE, B_ROWS, B_CHANNELS, B_RESIDUES, B_PLANES, B_TAPS, B_PADDED_TAPS, B_MATRIX, B_IDENTITY,
    B_PLANES_BYTES, B_GRADIENTS_BYTES, B_PLANE_STRIDE, B_GROUP_STRIDE, B_PLANE_ROW_STRIDE, B_PLANE_COLUMN_STRIDE,
    B_ROW_LIMIT, B_COLUMN_LIMIT, B_COLUMN_BLOCKS,
) = map(tl.constexpr, range(len(BlockRow._fields)))  # fmt: skip


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


(
    O_KIND, O_WEIGHT, O_OUTPUT_BYTES, O_ROW_STRIDE, O_SIDE, O_FIRST, O_LAST, O_TRANSPOSED, O_SYMMETRIC,
) = map(tl.constexpr, range(len(OutputRow._fields)))  # fmt: skip


class ProductRow(NamedTuple):
    """One product of the gram stage: both factors have one owner, one row stride and one contraction length."""

    owner: int
    left_bytes: int
    right_bytes: int
    row_stride: int
    length: int


(P_OWNER, P_LEFT_BYTES, P_RIGHT_BYTES, P_ROW_STRIDE, P_LENGTH, PRODUCT_SIZE) = map(
    tl.constexpr, range(len(ProductRow._fields) + 1)
)


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


(
    M_WEIGHT, M_OUTPUTS_BYTES, M_OUTPUT_STRIDE, M_ROW_STRIDE, M_SIDE, M_OUTPUTS, M_LAGS, M_SIZE, M_MATRICES,
) = map(tl.constexpr, range(len(MixRow._fields)))  # fmt: skip


class GradientRow(NamedTuple):
    """The gradient of one plane of one group, for apply: the sum over the terms ``[first, last)``."""

    small: int
    in_grads: int  # written straight into the weight's gradient
    target_bytes: int
    row_stride: int
    dtype: int
    rows: int
    columns: int  # padding included
    first: int
    last: int


(
    G_SMALL, G_IN_GRADS, G_TARGET_BYTES, G_ROW_STRIDE, G_DTYPE, G_ROWS, G_COLUMNS, G_FIRST, G_LAST,
) = map(tl.constexpr, range(len(GradientRow._fields)))  # fmt: skip


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


(
    T_MODE, T_LEFT_OWNER, T_LEFT_BYTES, T_LEFT_STRIDE, T_RIGHT_OWNER, T_RIGHT_BYTES, T_RIGHT_STRIDE, T_LENGTH,
    TERM_SIZE,
) = map(tl.constexpr, range(len(TermRow._fields) + 1))  # fmt: skip


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


(
    S_KIND, S_WEIGHT, S_ROW_STRIDE, S_CHANNEL_STRIDE, S_DTYPE, S_ROWS, S_CHANNELS, S_GROUPS, S_OUTPUTS_BYTES, S_PAIRS,
    S_TERMS, S_GRAD_BYTES, S_GRAD_ROW_STRIDE, S_GRAD_CHANNEL_STRIDE,
) = map(tl.constexpr, range(len(SmallRow._fields)))  # fmt: skip


class LossRow(NamedTuple):
    """One weight's loss: slots ``[first, last)`` of its partial sums, one per tile, and the constant of its side."""

    first: int
    last: int
    offset: int


(L_FIRST, L_LAST, L_OFFSET, LOSS_SIZE) = map(tl.constexpr, range(len(LossRow._fields) + 1))


class Tile(NamedTuple):
    """One work item: the row it belongs to, where in it, and the slot of its partial loss."""

    row: int
    first: int
    second: int
    slot: int


(I_ROW, I_FIRST, I_SECOND, I_SLOT, TILE_SIZE) = map(tl.constexpr, range(len(Tile._fields) + 1))
