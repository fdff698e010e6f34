# mypy: ignore-errors
"""The five stages as Triton device functions, one work item each, and the kernels that run them.

A work item (*tile*) is a row ``(row, first, second, slot)`` of ``tiles``: the index in ``table`` of what it belongs to
(see fields.py), where in it, and where its partial loss goes. Every function takes the tile's address, so the staged
kernels (one item per program) and the single kernel (a persistent grid) share them.

Sums run in a fixed order and no float is ever added atomically: the same input gives the same bits.

Where a tile begins is 64 bits wide; offsets within it are 32 bits (the host has checked that they fit).
"""

import triton
import triton.language as tl

from . import fields

# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def resolve(owner, offset_bytes, weights, workspace):
    """Address of ``offset_bytes`` into a weight, or into the workspace for the owner -1."""
    base = workspace.to(tl.int64)
    if owner >= 0:
        base = tl.load(weights + owner)
    return base + offset_bytes


@triton.jit
def aligned(address, DTYPE: tl.constexpr):
    """A pointer that the host has promised to be on a 16-byte boundary."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def aligned_stride(stride):
    """The same promise for a row stride; as arithmetic, since a hint on an argument is lost when this is inlined."""
    return stride // fields.ALIGN * fields.ALIGN


@triton.jit
def padded(length):
    """``length`` rounded up to what is stored; the multiple is visible to the compiler."""
    return (length + (fields.ALIGN - 1)) // fields.ALIGN * fields.ALIGN


@triton.jit
def load_float(address, first, offsets, mask, dtype):
    """Elements at ``first + offsets`` of a weight of any supported dtype as float32, zero where masked."""
    if dtype == fields.FLOAT32:
        values = tl.load(address.to(tl.pointer_type(tl.float32)) + first + offsets, mask=mask, other=0.0)
    elif dtype == fields.FLOAT16:
        values = tl.load(address.to(tl.pointer_type(tl.float16)) + first + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        start = address.to(tl.pointer_type(tl.bfloat16)) + first
        values = tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def store_float(address, first, offsets, values, mask, dtype, ADDS: tl.constexpr):
    """Float32 values to ``first + offsets`` of a gradient of any supported dtype, or added to what is there."""
    if ADDS:
        values += load_float(address, first, offsets, mask, dtype)
    if dtype == fields.FLOAT32:
        tl.store(aligned(address, tl.float32) + first + offsets, values, mask=mask)
    elif dtype == fields.FLOAT16:
        tl.store(aligned(address, tl.float16) + first + offsets, values.to(tl.float16), mask=mask)
    else:
        tl.store(aligned(address, tl.bfloat16) + first + offsets, values.to(tl.bfloat16), mask=mask)


@triton.jit
def gradient_base(weight, grads, targets, ADDS: tl.constexpr):
    """What the offset of a weight's gradient is relative to: where all of them lie, or what it is added to."""
    base = grads.to(tl.int64)
    if ADDS:
        base = tl.load(targets + weight)
    return base


@triton.jit
def gradient_factor(weight, with_grad, factors, factor):
    """What a weight's gradient is multiplied by; numbers of one weight each count where ``with_grad`` is SCALED."""
    scale = factor
    if with_grad == fields.SCALED:
        scale *= tl.load(factors + weight).to(tl.float32)
    return scale


@triton.jit
def nearest_in_tf32(values):
    """To the nearest number that a TF32 product takes, away from zero between two; NaN may become zero."""
    return ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_tf32(values):
    """To the nearest number that a TF32 product takes, away from zero between two; NaN stays NaN.

    Matrix instructions drop the low 13 bits of their operands, an error twice as large and always towards zero. So
    whatever they multiply is rounded where it is stored. NaN would become zero: its bits are all ones on a GPU.
    """
    return tl.where(values == values, nearest_in_tf32(values), values)


@triton.jit
def as_operand(values, PLANE: tl.constexpr, TF32: tl.constexpr):
    """Float32 values as products of planes take them."""
    if TF32:
        values = rounded_to_tf32(values)
    return values.to(PLANE)


@triton.jit
def high_bits(values):
    """What a TF32 product takes of float32 values; it would drop the rest itself."""
    return (values.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def split_product(left, right, total):
    """``total + A B`` of float32 matrices, with an error of about 2**-21 of the terms; that of TF32 is 2**-11.

    Three TF32 products of high and low bits; that of both low parts would be below the error.
    """
    left_high, right_high = high_bits(left), high_bits(right)
    total = tl.dot(high_bits(left - left_high), right_high, total, input_precision="tf32")
    total = tl.dot(left_high, high_bits(right - right_high), total, input_precision="tf32")
    return tl.dot(left_high, right_high, total, input_precision="tf32")


# ----------------------------------------------------------------------------------------------------------------------
# evaluate and gather: taps <-> planes
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def block_position(block, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Group, residue, first row and first channel of a tile of evaluate or gather."""
    part, place = tl.load(tile + fields.I_FIRST), tl.load(tile + fields.I_SECOND)
    # Divided in 32 bits: in 64, that is a good part of all instructions of a tile.
    residues = tl.load(block + fields.B_RESIDUES).to(tl.int32)
    across = ((tl.load(block + fields.B_WIDTH_WRITTEN) + (COLUMNS - 1)) // COLUMNS).to(tl.int32)
    group, residue = (part // residues).to(tl.int64), (part % residues).to(tl.int64)
    return group, residue, (place // across).to(tl.int64) * ROWS, (place % across).to(tl.int64) * COLUMNS


@triton.jit
def offsets_within(row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a tile's elements, from its first one; shape (ROWS, COLUMNS), 32 bits."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return row[:, None] * row_stride.to(tl.int32) + column[None, :] * column_stride.to(tl.int32)


@triton.jit
def inside_tile(first_row, rows, first_column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which of a tile's elements lie in a matrix of ``rows`` x ``columns``."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return (row < (rows - first_row).to(tl.int32))[:, None] & (column < (columns - first_column).to(tl.int32))[None, :]


@triton.jit
def block_sizes(block):
    """What both evaluate and gather need of a block's row."""
    return (
        tl.load(block + fields.B_ROWS),
        tl.load(block + fields.B_CHANNELS),
        tl.load(block + fields.B_PLANES),
        tl.load(block + fields.B_TAPS),
        tl.load(block + fields.B_PADDED_TAPS),
        tl.load(block + fields.B_IDENTITY),
        tl.load(block + fields.B_DTYPE),
        tl.load(block + fields.B_PLANE_STRIDE),
    )


@triton.jit
def in_plane(block, group, residue, row, channel):
    """Where the tile that begins at ``(row, channel)`` of a residue begins in a plane, and the strides within."""
    row_stride = tl.load(block + fields.B_PLANE_ROW_STRIDE)
    column_stride = tl.load(block + fields.B_PLANE_COLUMN_STRIDE)
    column = residue * tl.load(block + fields.B_CHANNELS) + channel
    first = group * tl.load(block + fields.B_GROUP_STRIDE) + row * row_stride + column * column_stride
    return first, row_stride, column_stride


@triton.jit
def evaluate_tile(
    table, constants, tile, weights, workspace,
    PLANE: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``V_p[i, (r, c)] = sum_m E[p, m] K[i, c, source[r, m]]`` for all planes of a tile of one residue.

    Sums of outer products: a tap's values stay with their threads, and no operand goes through shared memory.
    """
    block = table + tl.load(tile + fields.I_ROW)
    group, residue, row, channel = block_position(block, tile, ROWS, COLUMNS)
    rows, channels, planes, taps, padded_taps, identity, dtype, plane_stride = block_sizes(block)
    matrix = constants + aligned_stride(tl.load(block + fields.B_TRANSPOSED_MATRIX))
    padded_planes = (planes + (fields.CHUNK - 1)) // fields.CHUNK * fields.CHUNK
    tap_offsets = table + tl.load(block + fields.B_TAP_OFFSETS) + residue * padded_taps
    weight = resolve(tl.load(block + fields.B_WEIGHT), 0, weights, workspace)
    target = (workspace.to(tl.int64) + tl.load(block + fields.B_PLANES_BYTES)).to(tl.pointer_type(PLANE))

    row_stride, channel_stride = tl.load(block + fields.B_ROW_STRIDE), tl.load(block + fields.B_CHANNEL_STRIDE)
    inside = inside_tile(row, rows, channel, channels, ROWS, COLUMNS)
    first_element = (group * rows + row) * row_stride + channel * channel_stride
    elements = offsets_within(row_stride, channel_stride, ROWS, COLUMNS)
    # Padding belongs to the last residue and is written as zero.
    is_last = residue == tl.load(block + fields.B_RESIDUES) - 1
    column_limit = tl.where(is_last, tl.load(block + fields.B_COLUMN_LIMIT), channels)
    written = inside_tile(row, tl.load(block + fields.B_ROW_LIMIT), channel, column_limit, ROWS, COLUMNS)
    first_of_plane, plane_row_stride, plane_column_stride = in_plane(block, group, residue, row, channel)
    target += first_of_plane
    offsets = offsets_within(plane_row_stride, plane_column_stride, ROWS, COLUMNS)

    if identity != 0:
        for plane in range(planes):
            tap = tl.load(tap_offsets + plane)
            values = load_float(weight, first_element + tap, elements, inside & (tap >= 0), dtype)
            tl.store(target + plane * plane_stride + offsets, as_operand(values, PLANE, TF32), mask=written)
    else:
        lane = tl.arange(0, fields.CHUNK)
        for first in range(0, planes, fields.CHUNK):
            plane = first + lane
            values = tl.zeros((fields.CHUNK, ROWS, COLUMNS), tl.float32)
            for index in range(taps):
                tap = tl.load(tap_offsets + index)
                factors = tl.load(matrix + index * padded_planes + first + lane)
                taken = load_float(weight, first_element + tap, elements, inside & (tap >= 0), dtype)
                values += factors[:, None, None] * taken[None, :, :]
            mask = (plane < planes)[:, None, None] & written[None, :, :]
            values = as_operand(values, PLANE, TF32)
            tl.store((target + plane * plane_stride)[:, None, None] + offsets[None, :, :], values, mask=mask)


@triton.jit
def evaluate_tile_by_products(
    table, constants, tile, weights, workspace, TF32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The same by matrix instructions: at most CHUNK taps in float32, planes with neighbouring channels on a boundary.

    Half of the rows at a time, because their taps stay in registers for all planes.
    """
    PART: tl.constexpr = ROWS // 2
    block = table + tl.load(tile + fields.I_ROW)
    group, residue, row, channel = block_position(block, tile, ROWS, COLUMNS)
    rows, channels, planes, _taps, padded_taps, _identity, _dtype, plane_stride = block_sizes(block)
    padded_planes = (planes + (fields.CHUNK - 1)) // fields.CHUNK * fields.CHUNK
    lane = tl.arange(0, fields.CHUNK)
    matrix = constants + aligned_stride(tl.load(block + fields.B_TRANSPOSED_MATRIX))
    matrices = matrix + lane[:, None] * padded_planes + lane[None, :]

    row_stride, channel_stride = tl.load(block + fields.B_ROW_STRIDE), tl.load(block + fields.B_CHANNEL_STRIDE)
    weight = resolve(tl.load(block + fields.B_WEIGHT), 0, weights, workspace).to(tl.pointer_type(tl.float32))
    weight += (group * rows + row) * row_stride + channel * channel_stride
    tap = tl.load(table + tl.load(block + fields.B_TAP_OFFSETS) + residue * padded_taps + lane)
    sources = (weight + tap)[None, None, :] + offsets_within(row_stride, channel_stride, PART, COLUMNS)[:, :, None]

    plane_stride = aligned_stride(plane_stride)
    plane_row_stride = aligned_stride(tl.load(block + fields.B_PLANE_ROW_STRIDE))
    target = aligned(workspace.to(tl.int64) + tl.load(block + fields.B_PLANES_BYTES), tl.float32)
    target += group * aligned_stride(tl.load(block + fields.B_GROUP_STRIDE)) + row * plane_row_stride
    target += aligned_stride(residue * channels) + channel
    offsets = tl.arange(0, PART)[:, None] * plane_row_stride.to(tl.int32) + tl.arange(0, COLUMNS)[None, :]

    for part in tl.range(0, ROWS, PART, num_stages=1):  # buffers would take registers
        inside = inside_tile(row + part, rows, channel, channels, PART, COLUMNS)[:, :, None] & (tap >= 0)[None, None, :]
        taken = tl.load(sources + part * row_stride, mask=inside, other=0.0)
        taken = tl.reshape(taken, (PART * COLUMNS, fields.CHUNK))
        written = inside_tile(row + part, rows, channel, padded(channels), PART, COLUMNS)[None, :, :]
        for first in tl.range(0, planes, fields.CHUNK, num_stages=1):
            total = tl.zeros((PART * COLUMNS, fields.CHUNK), tl.float32)
            total = split_product(taken, tl.load(matrices + first), total)
            values = tl.reshape(tl.trans(as_operand(total, tl.float32, TF32)), (fields.CHUNK, PART, COLUMNS))
            start = target + part * plane_row_stride + (first + lane) * plane_stride
            mask = (first + lane < planes)[:, None, None] & written
            tl.store(start[:, None, None] + offsets[None, :, :], values, mask=mask)


@triton.jit
def evaluate_any(
    table, constants, tile, weights, workspace,
    PLANE: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    if BY_PRODUCTS:
        if tl.load(table + tl.load(tile + fields.I_ROW) + fields.B_EVALUATED_BY_PRODUCTS) != 0:
            evaluate_tile_by_products(table, constants, tile, weights, workspace, TF32, ROWS, COLUMNS)
        else:
            evaluate_tile(table, constants, tile, weights, workspace, PLANE, TF32, ROWS, COLUMNS)
    else:
        evaluate_tile(table, constants, tile, weights, workspace, PLANE, TF32, ROWS, COLUMNS)


@triton.jit
def gathered_tile(
    block, group, row, channel, grads, targets, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr
):
    """Where a tile's gradients go: address, its first element, offsets of the others, and which of them are there."""
    rows, channels = tl.load(block + fields.B_ROWS), tl.load(block + fields.B_CHANNELS)
    grad = gradient_base(tl.load(block + fields.B_WEIGHT), grads, targets, ADDS)
    grad += tl.load(block + fields.B_GRAD_BYTES)
    row_stride = tl.load(block + fields.B_GRAD_ROW_STRIDE)
    channel_stride = tl.load(block + fields.B_GRAD_CHANNEL_STRIDE)
    first_element = (group * rows + row) * row_stride + channel * channel_stride
    elements = offsets_within(row_stride, channel_stride, ROWS, COLUMNS)
    return grad, first_element, elements, inside_tile(row, rows, channel, channels, ROWS, COLUMNS)


@triton.jit
def store_taps(grad, first_element, elements, inside, taps, values, dtype, ADDS: tl.constexpr):
    """CHUNK taps of a tile, the last axis of ``values``: the order in which they lie in a contiguous gradient."""
    tap = tl.load(taps + tl.arange(0, fields.CHUNK))
    mask = (tap >= 0)[None, None, :] & inside[:, :, None]
    places = elements[:, :, None] + tap.to(tl.int32)[None, None, :]
    store_float(grad, first_element, places, values, mask, dtype, ADDS)


@triton.jit
def gather_tile(
    table, constants, tile, workspace, grads, targets, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr
):
    """``dK[i, c, source[r, m]] = sum_p E[p, m] G_p[i, (r, c)]``: the transpose of evaluate."""
    block = table + tl.load(tile + fields.I_ROW)
    group, residue, row, channel = block_position(block, tile, ROWS, COLUMNS)
    _rows, _channels, planes, taps, padded_taps, identity, dtype, plane_stride = block_sizes(block)
    matrix = constants + aligned_stride(tl.load(block + fields.B_MATRIX))
    tap_offsets = table + tl.load(block + fields.B_GRAD_TAP_OFFSETS) + residue * padded_taps
    padded_taps = aligned_stride(padded_taps)
    source = (workspace.to(tl.int64) + tl.load(block + fields.B_GRADIENTS_BYTES)).to(tl.pointer_type(tl.float32))
    first_of_plane, plane_row_stride, plane_column_stride = in_plane(block, group, residue, row, channel)
    source += first_of_plane
    offsets = offsets_within(plane_row_stride, plane_column_stride, ROWS, COLUMNS)
    grad, first_element, elements, inside = gathered_tile(
        block, group, row, channel, grads, targets, ROWS, COLUMNS, ADDS
    )

    lane = tl.arange(0, fields.CHUNK)
    for first in range(0, taps, fields.CHUNK):
        values = tl.zeros((fields.CHUNK, ROWS, COLUMNS), tl.float32)
        if identity != 0:
            for index in range(first, tl.minimum(first + fields.CHUNK, taps)):
                taken = tl.load(source + index * plane_stride + offsets, mask=inside, other=0.0)
                values += tl.where(first + lane == index, 1.0, 0.0)[:, None, None] * taken[None, :, :]
        else:
            for index in range(planes):
                factors = tl.load(matrix + index * padded_taps + first + lane)
                taken = tl.load(source + index * plane_stride + offsets, mask=inside, other=0.0)
                values += factors[:, None, None] * taken[None, :, :]
        values = tl.permute(values, (1, 2, 0))
        store_taps(grad, first_element, elements, inside, tap_offsets + first, values, dtype, ADDS)


@triton.jit
def gather_tile_by_products(
    table, constants, tile, workspace, grads, targets, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr
):
    """The same by matrix instructions, of planes whose channels are neighbours and begin on a boundary."""
    block = table + tl.load(tile + fields.I_ROW)
    group, residue, row, channel = block_position(block, tile, ROWS, COLUMNS)
    rows, channels, planes, taps, padded_taps, _identity, dtype, plane_stride = block_sizes(block)
    matrix = constants + aligned_stride(tl.load(block + fields.B_MATRIX))
    tap_offsets = table + tl.load(block + fields.B_GRAD_TAP_OFFSETS) + residue * padded_taps
    padded_taps = aligned_stride(padded_taps)
    plane_stride = aligned_stride(plane_stride)
    row_stride = aligned_stride(tl.load(block + fields.B_PLANE_ROW_STRIDE))
    source = aligned(workspace.to(tl.int64) + tl.load(block + fields.B_GRADIENTS_BYTES), tl.float32)
    source += group * aligned_stride(tl.load(block + fields.B_GROUP_STRIDE)) + row * row_stride
    source += aligned_stride(residue * channels) + channel
    offsets = tl.arange(0, ROWS)[:, None] * row_stride.to(tl.int32) + tl.arange(0, COLUMNS)[None, :]
    read = inside_tile(row, rows, channel, padded(channels), ROWS, COLUMNS)[None, :, :]
    grad, first_element, elements, inside = gathered_tile(
        block, group, row, channel, grads, targets, ROWS, COLUMNS, ADDS
    )

    lane = tl.arange(0, fields.CHUNK)
    for first in range(0, taps, fields.CHUNK):
        total = tl.zeros((ROWS * COLUMNS, fields.CHUNK), tl.float32)
        for start in tl.range(0, planes, fields.CHUNK, num_stages=1):  # buffers would take registers
            # The last plane stands for those that are not there: the matrix has zeros for them.
            plane = tl.minimum(start + lane, planes - 1) * plane_stride
            taken = tl.load((source + plane)[:, None, None] + offsets[None, :, :], mask=read, other=0.0)
            taken = tl.trans(tl.reshape(taken, (fields.CHUNK, ROWS * COLUMNS)))
            factors = tl.load(matrix + (start + lane)[:, None] * padded_taps + (first + lane)[None, :])
            total = split_product(taken, factors, total)
        values = tl.reshape(total, (ROWS, COLUMNS, fields.CHUNK))
        store_taps(grad, first_element, elements, inside, tap_offsets + first, values, dtype, ADDS)


@triton.jit
def gather_any(
    table, constants, tile, workspace, grads, targets,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    if BY_PRODUCTS:
        if tl.load(table + tl.load(tile + fields.I_ROW) + fields.B_BY_PRODUCTS) != 0:
            gather_tile_by_products(table, constants, tile, workspace, grads, targets, ROWS, COLUMNS, ADDS)
        else:
            gather_tile(table, constants, tile, workspace, grads, targets, ROWS, COLUMNS, ADDS)
    else:
        gather_tile(table, constants, tile, workspace, grads, targets, ROWS, COLUMNS, ADDS)


# ----------------------------------------------------------------------------------------------------------------------
# Targets: what the diagonal of lag 0 is compared with
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def squares_tile(table, tile, weights, workspace, partials, LANES: tl.constexpr):
    """Sum of squares of a piece of a group's weights, for a free target."""
    row = table + tl.load(tile + fields.I_ROW)
    element = tl.load(tile + fields.I_FIRST).to(tl.int64) * LANES * fields.SQUARES + tl.arange(0, LANES)
    elements = tl.load(row + fields.Q_ELEMENTS)
    channels = tl.load(row + fields.Q_CHANNELS)
    taps = tl.load(row + fields.Q_TAPS)
    weight = resolve(tl.load(row + fields.Q_WEIGHT), 0, weights, workspace)
    total = tl.zeros((LANES,), tl.float32)
    for _ in range(fields.SQUARES):
        inside = element < elements
        filters = tl.load(row + fields.Q_FIRST_ROW) + element // (channels * taps)
        offsets = filters * tl.load(row + fields.Q_ROW_STRIDE)
        offsets += element // taps % channels * tl.load(row + fields.Q_CHANNEL_STRIDE)
        offsets += tl.load(table + tl.load(row + fields.Q_TAP_OFFSETS) + element % taps)
        values = load_float(weight, 0, offsets, inside, tl.load(row + fields.Q_DTYPE))
        total += values * values
        element += LANES
    tl.store(partials + tl.load(tile + fields.I_SLOT), tl.sum(total))


@triton.jit
def target_value(target, partials):
    """The target of a TargetRow; a free one from sums that are complete."""
    value = tl.load(target + fields.A_VALUE).to(tl.int32).to(tl.float32, bitcast=True)
    if tl.load(target + fields.A_FREE) != 0:
        last = tl.load(target + fields.A_LAST)
        lane = tl.arange(0, fields.CHUNK)
        total = tl.zeros((fields.CHUNK,), tl.float32)
        for start in range(tl.load(target + fields.A_FIRST), last, fields.CHUNK):
            total += tl.load(partials + start + lane, mask=start + lane < last, other=0.0)
        value *= tl.sum(total)
    return value


@triton.jit
def compare(entries, on_diagonal, target, value):
    """Entries of lag 0 and other lags; those on its diagonal minus the target, or zero if they do not count."""
    ignored = tl.load(target + fields.A_IGNORED) != 0
    return tl.where(on_diagonal, tl.where(ignored, 0.0, entries - value), entries)


# ----------------------------------------------------------------------------------------------------------------------
# gram: products of planes, and the residual where the outputs are the lags themselves
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def gram_rows(
    left, right, stride, length, side, i, j, total,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``total + V V'^T`` of planes stored (side, contraction), for TILE rows from ``i`` and WIDTH from ``j`` on."""
    columns = padded(length).to(tl.int32)
    row, other, depth = tl.arange(0, TILE), tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    left_offsets = row[:, None] * stride.to(tl.int32) + depth[None, :]
    right_offsets = other[:, None] * stride.to(tl.int32) + depth[None, :]
    left_inside, right_inside = (row < (side - i).to(tl.int32))[:, None], (other < (side - j).to(tl.int32))[:, None]
    left += i * stride
    right += j * stride
    for start in range(0, length.to(tl.int32), DEPTH):
        inside = (depth < columns - start)[None, :]
        a = tl.load(left + start + left_offsets, mask=left_inside & inside, other=0.0)
        b = tl.load(right + start + right_offsets, mask=right_inside & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit
def gram_columns(
    left, right, stride, length, side, i, j, total,
    PRECISION: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same of planes stored (contraction, side)."""
    columns = padded(side)
    column, depth = tl.arange(0, TILE), tl.arange(0, DEPTH)
    offsets = depth[:, None] * stride.to(tl.int32) + column[None, :]
    left_inside = (column < (columns - i).to(tl.int32))[None, :]
    right_inside = (column < (columns - j).to(tl.int32))[None, :]
    left += i
    right += j
    length = length.to(tl.int32)
    for start in range(0, length, DEPTH):
        inside = (depth < length - start)[:, None]
        first = start * stride
        a = tl.load(left + first + offsets, mask=inside & left_inside, other=0.0)
        b = tl.load(right + first + offsets, mask=inside & right_inside, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    return total


@triton.jit
def gram_tile(
    table, tile, weights, workspace, partials, with_grad, factors, factor,
    PLANE: tl.constexpr, TF32: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``X_o = sum V_l V_r^T``; where outputs are lags, ``4 f (X_o - [lag 0] a I)`` and the loss instead."""
    output = table + tl.load(tile + fields.I_ROW)
    first_tile = tl.load(tile + fields.I_FIRST).to(tl.int64)
    second_tile = tl.load(tile + fields.I_SECOND).to(tl.int64)
    kind = tl.load(output + fields.O_KIND)
    side = tl.load(output + fields.O_SIDE)
    transposed = tl.load(output + fields.O_TRANSPOSED)
    i, j = first_tile * TILE, second_tile * TILE
    total = tl.zeros((TILE, TILE), tl.float32)
    for product in range(tl.load(output + fields.O_FIRST), tl.load(output + fields.O_LAST), fields.P_WIDTH):
        owner = tl.load(table + product + fields.P_OWNER)
        base = resolve(owner, 0, weights, workspace)
        left = aligned(base + tl.load(table + product + fields.P_LEFT_BYTES), PLANE)
        right = aligned(base + tl.load(table + product + fields.P_RIGHT_BYTES), PLANE)
        stride = aligned_stride(tl.load(table + product + fields.P_ROW_STRIDE))
        length = tl.load(table + product + fields.P_LENGTH)
        if transposed != 0:
            total = gram_columns(left, right, stride, length, side, i, j, total, PRECISION, TILE, DEPTH)
        else:
            total = gram_rows(left, right, stride, length, side, i, j, total, PRECISION, TILE, TILE, DEPTH)

    if TILE > 64:  # read again, since numbers kept through the loop would take registers that its sums need
        first_tile = tl.load(tile + fields.I_FIRST, volatile=True).to(tl.int64)
        second_tile = tl.load(tile + fields.I_SECOND, volatile=True).to(tl.int64)
        i, j = first_tile * TILE, second_tile * TILE
    mirrored = (tl.load(output + fields.O_SYMMETRIC) != 0) & (first_tile != second_tile)
    stored = with_grad != 0
    if kind == fields.STORE:
        stored = True
    else:
        row = tl.arange(0, TILE)
        on_diagonal = (row[:, None] == row[None, :]) & (row < (side - i).to(tl.int32))[:, None]
        on_diagonal &= (kind == fields.RESIDUAL_ZERO) & (first_tile == second_tile)
        wanted = table + tl.load(output + fields.O_TARGET)
        total = compare(total, on_diagonal, wanted, target_value(wanted, partials))
        # A lag stands for its negative too, and a tile above the diagonal for the one below it.
        weight = tl.where((kind == fields.RESIDUAL_ZERO) & (first_tile == second_tile), 1.0, 2.0)
        tl.store(partials + tl.load(tile + fields.I_SLOT), tl.sum(total * total) * weight)
        scale = 4.0 * gradient_factor(tl.load(output + fields.O_WEIGHT), with_grad, factors, factor)
        total = as_operand(total * scale, tl.float32, TF32)
    if stored:
        stride = aligned_stride(tl.load(output + fields.O_ROW_STRIDE))
        target = aligned(workspace.to(tl.int64) + tl.load(output + fields.O_OUTPUT_BYTES), tl.float32)
        columns = padded(side)
        row = tl.arange(0, TILE)
        offsets = row[:, None] * stride.to(tl.int32) + row[None, :]
        tl.store(target + (i * stride + j) + offsets, total, mask=inside_tile(i, side, j, columns, TILE, TILE))
        if mirrored:
            mask = inside_tile(j, side, i, columns, TILE, TILE)
            tl.store(target + (j * stride + i) + offsets, tl.trans(total), mask=mask)


@triton.jit
def gram_wide_tile(
    table, tile, workspace,
    PLANE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``X_o = sum V_l V_r^T`` that is neither symmetric nor a lag: larger tiles, which leave no registers for more."""
    output = table + tl.load(tile + fields.I_ROW)
    i = tl.load(tile + fields.I_FIRST).to(tl.int64) * TILE
    j = tl.load(tile + fields.I_SECOND).to(tl.int64) * WIDTH
    side = tl.load(output + fields.O_SIDE)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    base = workspace.to(tl.int64)
    for product in range(tl.load(output + fields.O_FIRST), tl.load(output + fields.O_LAST), fields.P_WIDTH):
        left = aligned(base + tl.load(table + product + fields.P_LEFT_BYTES), PLANE)
        right = aligned(base + tl.load(table + product + fields.P_RIGHT_BYTES), PLANE)
        stride = aligned_stride(tl.load(table + product + fields.P_ROW_STRIDE))
        length = tl.load(table + product + fields.P_LENGTH)
        total = gram_rows(left, right, stride, length, side, i, j, total, PRECISION, TILE, WIDTH, DEPTH)
    stride = aligned_stride(tl.load(output + fields.O_ROW_STRIDE))
    target = aligned(base + tl.load(output + fields.O_OUTPUT_BYTES), tl.float32)
    offsets = tl.arange(0, TILE)[:, None] * stride.to(tl.int32) + tl.arange(0, WIDTH)[None, :]
    mask = inside_tile(i, side, j, padded(side), TILE, WIDTH)
    tl.store(target + (i * stride + j) + offsets, total, mask=mask)


# ----------------------------------------------------------------------------------------------------------------------
# mix: outputs -> lags, residual and loss -> gradient of the outputs
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def mix_columns(
    outputs, output_stride, count, here, there, here_mask, there_mask, matrix, SIZE: tl.constexpr, SIDE: tl.constexpr
):
    """``P (x + y)`` and ``Q (x - y)`` of a tile x of all outputs and its mirror image y; (SIZE, SIDE, SIDE) each.

    ``matrix`` holds P and Q, (SIZE, SIZE) and column by column: sums of outer products, one output at a time.
    """
    lane = tl.arange(0, SIZE)
    symmetric = tl.zeros((SIZE, SIDE, SIDE), tl.float32)
    antisymmetric = tl.zeros((SIZE, SIDE, SIDE), tl.float32)
    for index in range(count):
        x = tl.load(outputs + index * output_stride + here, mask=here_mask, other=0.0)
        y = tl.trans(tl.load(outputs + index * output_stride + there, mask=there_mask, other=0.0))
        p = tl.load(matrix + index * SIZE + lane)
        q = tl.load(matrix + SIZE * SIZE + index * SIZE + lane)
        symmetric += p[:, None, None] * (x + y)[None, :, :]
        antisymmetric += q[:, None, None] * (x - y)[None, :, :]
    return symmetric, antisymmetric


@triton.jit
def mix_store(
    outputs, output_stride, count, here, there, here_mask, there_mask, symmetric, antisymmetric, mirrored,
    TF32: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``symmetric + antisymmetric`` over the tile and the difference over its mirror image."""
    # Nothing is overwritten before all threads have read it.
    tl.debug_barrier()
    lane = tl.arange(0, SIZE)
    exists = (lane < count)[:, None, None]
    start = outputs + (lane * output_stride)[:, None, None]
    image = as_operand(symmetric + antisymmetric, tl.float32, TF32)
    tl.store(start + here[None, :, :], image, mask=exists & here_mask[None, :, :])
    if mirrored:
        mirror = tl.permute(as_operand(symmetric - antisymmetric, tl.float32, TF32), (0, 2, 1))
        tl.store(start + there[None, :, :], mirror, mask=exists & there_mask[None, :, :])


@triton.jit
def mix_pair(
    table, constants, tile, workspace, partials, with_grad, factors, factor,
    TF32: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """A tile of all outputs together with its mirror image, in place; SIZE bounds the number of outputs.

    With x and y an entry and its mirror image, ``rs = S (x + y)`` and ``ra = A (x - y)`` give both residuals,
    ``rs + ra`` and ``rs - ra``. These take the place of the outputs (there are no more lags than outputs), and the
    adjoint matrices make both gradients of them in the same way.
    """
    row = table + tl.load(tile + fields.I_ROW)
    first_tile = tl.load(tile + fields.I_FIRST).to(tl.int64)
    second_tile = tl.load(tile + fields.I_SECOND).to(tl.int64)
    side = tl.load(row + fields.M_SIDE)
    count = tl.load(row + fields.M_OUTPUTS)
    lags = tl.load(row + fields.M_LAGS)
    matrix = constants + aligned_stride(tl.load(row + fields.M_MATRICES))
    output_stride = aligned_stride(tl.load(row + fields.M_OUTPUT_STRIDE))
    stride = aligned_stride(tl.load(row + fields.M_ROW_STRIDE))
    outputs = aligned(workspace.to(tl.int64) + tl.load(row + fields.M_OUTPUTS_BYTES), tl.float32)
    i = first_tile * SIDE + tl.arange(0, SIDE)
    j = second_tile * SIDE + tl.arange(0, SIDE)
    columns = padded(side)
    here = i[:, None] * stride + j[None, :]
    there = j[:, None] * stride + i[None, :]
    here_mask = (i < side)[:, None] & (j < columns)[None, :]
    there_mask = (j < side)[:, None] & (i < columns)[None, :]
    mirrored = first_tile != second_tile

    symmetric, antisymmetric = mix_columns(
        outputs, output_stride, count, here, there, here_mask, there_mask, matrix, SIZE, SIDE
    )
    lag = tl.arange(0, SIZE)
    on_diagonal = (i[:, None] == j[None, :]) & (i < side)[:, None]
    target = table + tl.load(row + fields.M_TARGET)
    value = target_value(target, partials)
    symmetric = compare(symmetric, (lag == 0)[:, None, None] & on_diagonal[None, :, :], target, value)
    # One entry stands for its mirror image, and a lag for its negative; a tile on the diagonal holds both images.
    weight = tl.where(lag == 0, 2.0, 4.0) * tl.where(mirrored, 1.0, 0.5)
    loss = tl.sum((symmetric * symmetric + antisymmetric * antisymmetric) * weight[:, None, None])
    tl.store(partials + tl.load(tile + fields.I_SLOT), loss)
    if with_grad != 0:
        mix_store(
            outputs, output_stride, lags, here, there, here_mask, there_mask, symmetric, antisymmetric, mirrored,
            False, SIZE,
        )  # fmt: skip
        tl.debug_barrier()
        symmetric, antisymmetric = mix_columns(
            outputs, output_stride, lags, here, there, here_mask, there_mask, matrix + 2 * SIZE * SIZE, SIZE, SIDE
        )
        scale = gradient_factor(tl.load(row + fields.M_WEIGHT), with_grad, factors, factor)
        mix_store(
            outputs, output_stride, count, here, there, here_mask, there_mask, symmetric * scale, antisymmetric * scale,
            mirrored, TF32, SIZE,
        )  # fmt: skip


@triton.jit
def mix_product(values, matrix, rows, scale, ENTRIES: tl.constexpr, SIZE: tl.constexpr):
    """``X M^T`` of ``(ENTRIES, SIZE)`` values and a matrix stored column by column; ``rows`` says in which order."""
    factors = tl.load(matrix + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :])
    return split_product(values, factors * scale, tl.zeros((ENTRIES, SIZE), tl.float32))


@triton.jit
def in_operand_order(values, ENTRIES: tl.constexpr, SIZE: tl.constexpr):
    """Columns in the order in which the threads that hold a product's sums would hold an operand: none is moved.

    Of eight neighbouring columns a thread has 2 t and 2 t + 1 in the sums, but t and t + 4 of an operand.
    """
    parts = tl.permute(tl.reshape(values, (ENTRIES, SIZE // 8, 4, 2)), (0, 1, 3, 2))
    return tl.reshape(parts, (ENTRIES, SIZE))


@triton.jit
def mix_pair_by_products(
    table, constants, tile, workspace, partials, with_grad, factors, factor,
    TF32: tl.constexpr, SIZE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """What :func:`mix_pair` does, with half of its instructions: by matrix instructions, and without going to memory.

    Where products are rounded to TF32 anyway.
    """
    ENTRIES: tl.constexpr = SIDE * SIDE
    row = table + tl.load(tile + fields.I_ROW)
    first_tile = tl.load(tile + fields.I_FIRST).to(tl.int64)
    second_tile = tl.load(tile + fields.I_SECOND).to(tl.int64)
    mirrored = first_tile != second_tile
    side = tl.load(row + fields.M_SIDE)
    count = tl.load(row + fields.M_OUTPUTS)
    matrix = constants + aligned_stride(tl.load(row + fields.M_MATRICES))
    stride = aligned_stride(tl.load(row + fields.M_ROW_STRIDE))
    outputs = aligned(workspace.to(tl.int64) + tl.load(row + fields.M_OUTPUTS_BYTES), tl.float32)
    lane, place = tl.arange(0, SIZE), tl.arange(0, SIDE)
    i, j = first_tile * SIDE, second_tile * SIDE
    offsets = (place[:, None] * stride.to(tl.int32) + place[None, :])[None, :, :]
    here_mask = inside_tile(i, side, j, padded(side), SIDE, SIDE)[None, :, :]
    there_mask = inside_tile(j, side, i, padded(side), SIDE, SIDE)[None, :, :]
    # The last output stands for those that are not there: the matrices have zeros for them.
    output = tl.minimum(lane, count - 1) * aligned_stride(tl.load(row + fields.M_OUTPUT_STRIDE))
    here = (outputs + (i * stride + j) + output)[:, None, None] + offsets
    there = (outputs + (j * stride + i) + output)[:, None, None] + offsets

    x = tl.load(here, mask=here_mask, other=0.0)
    y = tl.permute(tl.load(there, mask=there_mask, other=0.0), (0, 2, 1))
    symmetric = tl.trans(tl.reshape(x + y, (SIZE, ENTRIES)))
    antisymmetric = tl.trans(tl.reshape(x - y, (SIZE, ENTRIES)))
    symmetric = mix_product(symmetric, matrix, lane, 1.0, ENTRIES, SIZE)
    antisymmetric = mix_product(antisymmetric, matrix + SIZE * SIZE, lane, 1.0, ENTRIES, SIZE)
    if first_tile == second_tile:
        entry = tl.arange(0, ENTRIES)
        on_diagonal = (entry // SIDE == entry % SIDE) & (entry // SIDE < (side - i).to(tl.int32))
        target = table + tl.load(row + fields.M_TARGET)
        value = target_value(target, partials)
        symmetric = compare(symmetric, on_diagonal[:, None] & (lane == 0)[None, :], target, value)
    weight = tl.where(lane == 0, 2.0, 4.0) * tl.where(mirrored, 1.0, 0.5)
    loss = tl.sum(tl.sum(symmetric * symmetric + antisymmetric * antisymmetric, 0) * weight)
    tl.store(partials + tl.load(tile + fields.I_SLOT), loss)
    if with_grad != 0:
        # Twice, since the adjoint matrices are halved for the sum of two residuals, which is twice rs.
        scale = 2.0 * gradient_factor(tl.load(row + fields.M_WEIGHT), with_grad, factors, factor)
        lag = lane // 8 * 8 + lane % 4 * 2 + lane // 4 % 2
        symmetric = in_operand_order(symmetric, ENTRIES, SIZE)
        antisymmetric = in_operand_order(antisymmetric, ENTRIES, SIZE)
        symmetric = mix_product(symmetric, matrix + 2 * SIZE * SIZE, lag, scale, ENTRIES, SIZE)
        antisymmetric = mix_product(antisymmetric, matrix + 3 * SIZE * SIZE, lag, scale, ENTRIES, SIZE)
        # Nothing is overwritten before all threads have read it.
        tl.debug_barrier()
        exists = (lane < count)[:, None, None]
        image = symmetric + antisymmetric
        mirror = symmetric - antisymmetric
        if TF32:
            # One question for all of them instead of one each: no gradient of so small a loss is NaN or infinite.
            is_small = loss * scale * scale < 1e30
            if is_small:
                image = nearest_in_tf32(image)
                mirror = nearest_in_tf32(mirror)
        tl.store(here, tl.reshape(tl.trans(image), (SIZE, SIDE, SIDE)), mask=exists & here_mask)
        if mirrored:
            turned = tl.permute(tl.reshape(tl.trans(mirror), (SIZE, SIDE, SIDE)), (0, 2, 1))
            tl.store(there, turned, mask=exists & there_mask)


@triton.jit
def mix_tile(
    table, constants, tile, workspace, partials, with_grad, factors, factor,
    TF32: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The tile's side falls as the number of outputs rises, so that both fit in registers."""
    size = tl.load(table + tl.load(tile + fields.I_ROW) + fields.M_SIZE)
    if size == 16:
        if BY_PRODUCTS:
            mix_pair_by_products(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, 16, 16)
        else:
            mix_pair(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, 16, 16)
    elif size == 32:
        if BY_PRODUCTS:
            mix_pair_by_products(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, 32, 8)
        else:
            mix_pair(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, 32, 8)
    else:
        mix_pair(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, 64, 8)


# ----------------------------------------------------------------------------------------------------------------------
# apply: gradients of the planes
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def apply_term(
    left, left_stride, right, right_stride, length, rows, columns, i, j, total,
    TRANSPOSE: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """``total + A B`` from row ``i`` and column ``j`` on, with A stored transposed if TRANSPOSE.

    Both operands are rounded to FACTOR first.
    """
    place, column, depth = tl.arange(0, TILE), tl.arange(0, WIDTH), tl.arange(0, DEPTH)
    left_step, right_step = left_stride.to(tl.int32), right_stride.to(tl.int32)
    right_offsets = depth[:, None] * right_step + column[None, :]
    right_inside = (column < (columns - j).to(tl.int32))[None, :]
    right += j
    if TRANSPOSE:
        left += i
        left_offsets = depth[:, None] * left_step + place[None, :]
        left_inside = (place < (padded(rows) - i).to(tl.int32))[None, :]
    else:
        left += i * left_stride
        left_offsets = place[:, None] * left_step + depth[None, :]
        left_inside = (place < (rows - i).to(tl.int32))[:, None]
    within = padded(length).to(tl.int32)
    length = length.to(tl.int32)
    for start in range(0, length, DEPTH):
        inside = (depth < length - start)[:, None]
        if TRANSPOSE:
            a = tl.trans(tl.load(left + start * left_stride + left_offsets, mask=inside & left_inside, other=0.0))
        else:
            a = tl.load(left + start + left_offsets, mask=left_inside & (depth < within - start)[None, :], other=0.0)
        b = tl.load(right + start * right_stride + right_offsets, mask=inside & right_inside, other=0.0)
        total = tl.dot(a.to(FACTOR), b.to(FACTOR), total, input_precision=PRECISION)
    return total


@triton.jit
def apply_tile(
    table, tile, weights, workspace, grads, targets,
    PLANE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """``G_p = sum Y_o V_r + sum Y_o^T V_l`` over the products in which plane p is the left and the right factor."""
    gradient = table + tl.load(tile + fields.I_ROW)
    i = tl.load(tile + fields.I_FIRST).to(tl.int64) * TILE
    j = tl.load(tile + fields.I_SECOND).to(tl.int64) * TILE
    rows = tl.load(gradient + fields.G_ROWS)
    columns = aligned_stride(tl.load(gradient + fields.G_COLUMNS))
    total = tl.zeros((TILE, TILE), tl.float32)
    for index in range(tl.load(gradient + fields.G_FIRST), tl.load(gradient + fields.G_LAST), fields.T_WIDTH):
        term = table + index
        mode = tl.load(term + fields.T_MODE)
        left = resolve(tl.load(term + fields.T_LEFT_OWNER), tl.load(term + fields.T_LEFT_BYTES), weights, workspace)
        right = resolve(tl.load(term + fields.T_RIGHT_OWNER), tl.load(term + fields.T_RIGHT_BYTES), weights, workspace)
        left_stride = aligned_stride(tl.load(term + fields.T_LEFT_STRIDE))
        right_stride = aligned_stride(tl.load(term + fields.T_RIGHT_STRIDE))
        length = tl.load(term + fields.T_LENGTH)
        if mode == fields.TRANSPOSED:
            total = apply_term(
                aligned(left, tl.float32), left_stride, aligned(right, PLANE), right_stride, length, rows, columns,
                i, j, total, True, PLANE, PRECISION, TILE, TILE, DEPTH,
            )  # fmt: skip
        elif mode == fields.SWAPPED:
            total = apply_term(
                aligned(left, PLANE), left_stride, aligned(right, tl.float32), right_stride, length, rows, columns,
                i, j, total, False, PLANE, PRECISION, TILE, TILE, DEPTH,
            )  # fmt: skip
        else:
            total = apply_term(
                aligned(left, tl.float32), left_stride, aligned(right, PLANE), right_stride, length, rows, columns,
                i, j, total, False, PLANE, PRECISION, TILE, TILE, DEPTH,
            )  # fmt: skip
    target_bytes = tl.load(gradient + fields.G_TARGET_BYTES)
    stride = aligned_stride(tl.load(gradient + fields.G_ROW_STRIDE))
    place = tl.arange(0, TILE)
    offsets = place[:, None] * stride.to(tl.int32) + place[None, :]
    mask = inside_tile(i, rows, j, columns, TILE, TILE)
    dtype = tl.load(gradient + fields.G_DTYPE)
    if tl.load(gradient + fields.G_IN_GRADS) != 0:
        base = gradient_base(tl.load(gradient + fields.G_WEIGHT), grads, targets, ADDS)
        store_float(base + target_bytes, i * stride + j, offsets, total, mask, dtype, ADDS)
    else:
        target = aligned(workspace.to(tl.int64) + target_bytes, tl.float32)
        tl.store(target + (i * stride + j) + offsets, total, mask=mask)


@triton.jit
def apply_wide_tile(
    table, tile, workspace,
    PLANE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The same of planes and gradients in the workspace: larger tiles, which leave no registers for more."""
    gradient = table + tl.load(tile + fields.I_ROW)
    i = tl.load(tile + fields.I_FIRST).to(tl.int64) * TILE
    j = tl.load(tile + fields.I_SECOND).to(tl.int64) * WIDTH
    rows = tl.load(gradient + fields.G_ROWS)
    columns = aligned_stride(tl.load(gradient + fields.G_COLUMNS))
    total = tl.zeros((TILE, WIDTH), tl.float32)
    base = workspace.to(tl.int64)
    for index in range(tl.load(gradient + fields.G_FIRST), tl.load(gradient + fields.G_LAST), fields.T_WIDTH):
        term = table + index
        left = aligned(base + tl.load(term + fields.T_LEFT_BYTES), tl.float32)
        right = aligned(base + tl.load(term + fields.T_RIGHT_BYTES), PLANE)
        left_stride = aligned_stride(tl.load(term + fields.T_LEFT_STRIDE))
        right_stride = aligned_stride(tl.load(term + fields.T_RIGHT_STRIDE))
        length = tl.load(term + fields.T_LENGTH)
        if tl.load(term + fields.T_MODE) == fields.TRANSPOSED:
            total = apply_term(
                left, left_stride, right, right_stride, length, rows, columns, i, j, total,
                True, PLANE, PRECISION, TILE, WIDTH, DEPTH,
            )  # fmt: skip
        else:
            total = apply_term(
                left, left_stride, right, right_stride, length, rows, columns, i, j, total,
                False, PLANE, PRECISION, TILE, WIDTH, DEPTH,
            )  # fmt: skip
    stride = aligned_stride(tl.load(gradient + fields.G_ROW_STRIDE))
    target = aligned(base + tl.load(gradient + fields.G_TARGET_BYTES), tl.float32)
    offsets = tl.arange(0, TILE)[:, None] * stride.to(tl.int32) + tl.arange(0, WIDTH)[None, :]
    mask = inside_tile(i, rows, j, columns, TILE, WIDTH)
    tl.store(target + (i * stride + j) + offsets, total, mask=mask)


# ----------------------------------------------------------------------------------------------------------------------
# Tiny groups: no matrix products, one lane per entry
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def small_gram_tile(table, tile, weights, workspace, partials, with_grad, factors, factor, LANES: tl.constexpr):
    """Residual of one lag, an entry ``(group, i, j)`` per lane, stored times 4 and the factor; and its loss."""
    row = table + tl.load(tile + fields.I_ROW)
    lag = tl.load(tile + fields.I_FIRST).to(tl.int64)
    rows = tl.load(row + fields.S_ROWS)
    entry = tl.load(tile + fields.I_SECOND).to(tl.int64) * LANES + tl.arange(0, LANES)
    entries = tl.load(row + fields.S_GROUPS) * rows * rows
    inside = entry < entries
    group, i, j = entry // (rows * rows), entry // rows % rows, entry % rows
    weight = resolve(tl.load(row + fields.S_WEIGHT), 0, weights, workspace)
    dtype = tl.load(row + fields.S_DTYPE)
    row_stride = tl.load(row + fields.S_ROW_STRIDE)
    channel_stride = tl.load(row + fields.S_CHANNEL_STRIDE)
    first_row = (group * rows + i) * row_stride
    second_row = (group * rows + j) * row_stride
    pairs = table + tl.load(row + fields.S_PAIRS) + 2 * lag
    total = tl.zeros((LANES,), tl.float32)
    for pair in range(tl.load(pairs), tl.load(pairs + 1), 2):
        left = first_row + tl.load(table + pair)
        right = second_row + tl.load(table + pair + 1)
        for channel in range(tl.load(row + fields.S_CHANNELS)):
            a = load_float(weight, channel * channel_stride, left, inside, dtype)
            b = load_float(weight, channel * channel_stride, right, inside, dtype)
            total += a * b
    wanted = table + tl.load(row + fields.S_TARGET)
    value = tl.zeros((LANES,), tl.float32)
    if lag == 0:
        value += tl.load(wanted + fields.A_VALUE).to(tl.int32).to(tl.float32, bitcast=True)
        if tl.load(wanted + fields.A_FREE) != 0:  # of the group of each lane: lag 0 pairs every tap with itself
            squares = tl.zeros((LANES,), tl.float32)
            for pair in range(tl.load(pairs), tl.load(pairs + 1), 2):
                for k in range(rows):
                    start = (group * rows + k) * row_stride + tl.load(table + pair)
                    for channel in range(tl.load(row + fields.S_CHANNELS)):
                        a = load_float(weight, channel * channel_stride, start, inside, dtype)
                        squares += a * a
            value *= squares
    total = compare(total, inside & (i == j) & (lag == 0), wanted, value)
    loss = tl.sum(total * total) * tl.where(lag == 0, 1.0, 2.0)
    tl.store(partials + tl.load(tile + fields.I_SLOT), loss)
    if with_grad != 0:
        target = (workspace.to(tl.int64) + tl.load(row + fields.S_OUTPUTS_BYTES)).to(tl.pointer_type(tl.float32))
        scale = 4.0 * gradient_factor(tl.load(row + fields.S_WEIGHT), with_grad, factors, factor)
        tl.store(target + lag * entries + entry, total * scale, mask=inside)


@triton.jit
def small_apply_tile(table, tile, weights, workspace, grads, targets, LANES: tl.constexpr, ADDS: tl.constexpr):
    """Gradient of one tap, an entry ``(group, i, c)`` per lane."""
    row = table + tl.load(tile + fields.I_ROW)
    rows = tl.load(row + fields.S_ROWS)
    channels = tl.load(row + fields.S_CHANNELS)
    groups = tl.load(row + fields.S_GROUPS)
    entry = tl.load(tile + fields.I_SECOND).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = entry < groups * rows * channels
    group, i, channel = entry // (rows * channels), entry // channels % rows, entry % channels
    weight = resolve(tl.load(row + fields.S_WEIGHT), 0, weights, workspace)
    dtype = tl.load(row + fields.S_DTYPE)
    row_stride = tl.load(row + fields.S_ROW_STRIDE)
    elements = group * rows * row_stride + channel * tl.load(row + fields.S_CHANNEL_STRIDE)
    outputs = (workspace.to(tl.int64) + tl.load(row + fields.S_OUTPUTS_BYTES)).to(tl.pointer_type(tl.float32))
    outputs += group * rows * rows
    terms = table + tl.load(row + fields.S_TERMS) + 3 * tl.load(tile + fields.I_FIRST)
    total = tl.zeros((LANES,), tl.float32)
    for term in range(tl.load(terms), tl.load(terms + 1), 3):
        tap = tl.load(table + term)
        output = tl.load(table + term + 1) * groups * rows * rows
        transposed = tl.load(table + term + 2)
        for k in range(rows):
            entry_of_output = tl.where(transposed != 0, k * rows + i, i * rows + k)
            y = tl.load(outputs + output + entry_of_output, mask=inside, other=0.0)
            total += y * load_float(weight, k * row_stride + tap, elements, inside, dtype)
    target = (group * rows + i) * tl.load(row + fields.S_GRAD_ROW_STRIDE)
    target += channel * tl.load(row + fields.S_GRAD_CHANNEL_STRIDE)
    grad = gradient_base(tl.load(row + fields.S_WEIGHT), grads, targets, ADDS) + tl.load(row + fields.S_GRAD_BYTES)
    store_float(grad, tl.load(terms + 2), target, total, inside, dtype, ADDS)


# ----------------------------------------------------------------------------------------------------------------------
# Loss
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def reduce_loss(table, loss_rows, index, partials, losses, LANES: tl.constexpr):
    """Loss of one weight from its partial sums, added in order in float64; never below zero, NaN stays NaN."""
    row = table + loss_rows + index * fields.L_WIDTH
    last = tl.load(row + fields.L_LAST)
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float64)
    for start in range(tl.load(row + fields.L_FIRST), last, LANES):
        slot = start + lane
        total += tl.load(partials + slot, mask=slot < last, other=0.0).to(tl.float64)
    loss = tl.sum(total)
    offset = tl.load(row + fields.L_OFFSET)
    if offset != 0:
        target = table + tl.load(row + fields.L_TARGET)
        for group in range(tl.load(row + fields.L_GROUPS)):
            value = target_value(target + group * fields.A_WIDTH, partials).to(tl.float64)
            loss += offset.to(tl.float64) * value * value
    tl.store(losses + index, tl.where(loss < 0, 0.0, loss).to(tl.float32))


@triton.jit
def clear_arrivals(arrivals, count, LANES: tl.constexpr):
    """No tile of any weight has arrived yet."""
    lane = tl.arange(0, LANES)
    for start in range(0, count, LANES):
        tl.store(arrivals + start + lane, tl.zeros((LANES,), tl.int32), mask=start + lane < count)


@triton.jit
def arrive(counter):
    """How many arrived before; whoever arrives later sees what was written before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def finish_loss(table, loss_rows, index, arrivals, partials, losses, LANES: tl.constexpr):
    """Called after each tile of a weight: the program that finishes the last one reduces the weight's loss.

    Which one that is may change from run to run, the order of the sum does not.
    """
    row = table + loss_rows + index * fields.L_WIDTH
    tiles = tl.load(row + fields.L_LAST) - tl.load(row + fields.L_FIRST)
    if arrive(arrivals + index) == tiles - 1:
        reduce_loss(table, loss_rows, index, partials, losses, LANES)


# ----------------------------------------------------------------------------------------------------------------------
# Staged kernels: one work item per program
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def squares_kernel(table, tiles, weights, workspace, partials, LANES: tl.constexpr):
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    squares_tile(table, tile, weights, workspace, partials, LANES)


@triton.jit(do_not_specialize=["count"])
def evaluate_kernel(
    table, constants, tiles, weights, workspace, arrivals, count,
    PLANE: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    evaluate_any(table, constants, tile, weights, workspace, PLANE, TF32, ROWS, COLUMNS, BY_PRODUCTS)
    if tl.program_id(0) == 0:
        clear_arrivals(arrivals, count, COLUMNS)


@triton.jit
def gram_any(
    table, tile, weights, workspace, partials, with_grad, factors, factor, PLANE: tl.constexpr, TF32: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    kind = tl.load(table + tl.load(tile + fields.I_ROW) + fields.O_KIND)
    if kind == fields.SMALL:
        small_gram_tile(table, tile, weights, workspace, partials, with_grad, factors, factor, LANES)
    elif WIDTH == TILE:
        gram_tile(
            table, tile, weights, workspace, partials, with_grad, factors, factor, PLANE, TF32, PRECISION, TILE, DEPTH
        )
    elif kind == fields.STORE_WIDE:
        gram_wide_tile(table, tile, workspace, PLANE, PRECISION, TILE, WIDTH, DEPTH)
    else:
        gram_tile(
            table, tile, weights, workspace, partials, with_grad, factors, factor, PLANE, TF32, PRECISION, TILE, DEPTH
        )


@triton.jit(do_not_specialize=["loss_rows", "with_grad"])
def gram_kernel(
    table, tiles, weights, workspace, partials, arrivals, losses, loss_rows, with_grad, factors, factor,
    PLANE: tl.constexpr, TF32: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    gram_any(
        table, tile, weights, workspace, partials, with_grad, factors, factor,
        PLANE, TF32, PRECISION, TILE, WIDTH, DEPTH, LANES,
    )  # fmt: skip
    row = table + tl.load(tile + fields.I_ROW)
    if tl.load(row + fields.O_KIND) > fields.STORE:
        finish_loss(table, loss_rows, tl.load(row + fields.O_WEIGHT), arrivals, partials, losses, LANES)


@triton.jit(do_not_specialize=["loss_rows", "with_grad"])
def mix_kernel(
    table, constants, tiles, workspace, partials, arrivals, losses, loss_rows, with_grad, factors, factor,
    TF32: tl.constexpr, BY_PRODUCTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    mix_tile(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, BY_PRODUCTS)
    weight = tl.load(table + tl.load(tile + fields.I_ROW) + fields.M_WEIGHT)
    finish_loss(table, loss_rows, weight, arrivals, partials, losses, LANES)


@triton.jit
def apply_any(
    table, tile, weights, workspace, grads, targets, PLANE: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    kind = tl.load(table + tl.load(tile + fields.I_ROW) + fields.G_KIND)
    if kind == fields.SMALL:
        small_apply_tile(table, tile, weights, workspace, grads, targets, LANES, ADDS)
    elif kind == fields.STORE_WIDE:
        if WIDTH > TILE:
            apply_wide_tile(table, tile, workspace, PLANE, PRECISION, TILE, WIDTH, DEPTH)
    else:
        apply_tile(table, tile, weights, workspace, grads, targets, PLANE, PRECISION, TILE, DEPTH, ADDS)


@triton.jit
def apply_kernel(
    table, tiles, weights, workspace, grads, targets, PLANE: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    apply_any(table, tile, weights, workspace, grads, targets, PLANE, PRECISION, TILE, WIDTH, DEPTH, LANES, ADDS)


@triton.jit
def gather_kernel(
    table, constants, tiles, workspace, grads, targets,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDS: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(0).to(tl.int64) * fields.I_WIDTH
    gather_any(table, constants, tile, workspace, grads, targets, ROWS, COLUMNS, ADDS, BY_PRODUCTS)


# ----------------------------------------------------------------------------------------------------------------------
# Single kernel: a persistent grid, all programs resident, with a barrier between stages
# ----------------------------------------------------------------------------------------------------------------------


@triton.jit
def grid_barrier(arrivals, target):
    """Wait until ``target`` programs have arrived; everything written before is visible after."""
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="release")
    while tl.atomic_add(arrivals, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit(do_not_specialize=["with_grad", "pass_rows", "passes", "loss_rows", "count"])
def single_kernel(
    table, constants, tiles, weights, workspace, partials, grads, targets, losses, arrivals, with_grad, factors, factor,
    pass_rows, passes, loss_rows, count,
    PLANE: tl.constexpr, TF32: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHERED_COLUMNS: tl.constexpr,
    LANES: tl.constexpr, ADDS: tl.constexpr, BY_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """All stages of all passes, in order; ``arrivals`` starts at zero.

    A stage without work needs no barrier of its own. The losses are reduced while others apply. Nothing is hoisted out
    of the loops: what one stage has computed beforehand would take registers from all others.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    target = programs
    for index_of_pass in tl.range(0, passes, disable_licm=True):
        row = table + pass_rows + index_of_pass * fields.E_WIDTH
        begin, squares_end = tl.load(row + fields.E_BEGIN), tl.load(row + fields.E_SQUARES_END)
        evaluate_end, gram_end = tl.load(row + fields.E_EVALUATE_END), tl.load(row + fields.E_GRAM_END)
        mix_end, apply_end = tl.load(row + fields.E_MIX_END), tl.load(row + fields.E_APPLY_END)
        gather_end = tl.load(row + fields.E_GATHER_END)
        for index in tl.range(begin + program, squares_end, programs, disable_licm=True):
            squares_tile(table, tiles + index * fields.I_WIDTH, weights, workspace, partials, LANES)
        for index in tl.range(squares_end + program, evaluate_end, programs, disable_licm=True):
            tile = tiles + index * fields.I_WIDTH
            evaluate_any(table, constants, tile, weights, workspace, PLANE, TF32, ROWS, COLUMNS, BY_PRODUCTS)
        if evaluate_end > begin:
            grid_barrier(arrivals, target)
            target += programs
        for index in tl.range(evaluate_end + program, gram_end, programs, disable_licm=True):
            tile = tiles + index * fields.I_WIDTH
            gram_any(
                table, tile, weights, workspace, partials, with_grad, factors, factor,
                PLANE, TF32, PRECISION, TILE, WIDTH, DEPTH, LANES,
            )  # fmt: skip
        grid_barrier(arrivals, target)
        target += programs
        for index in tl.range(gram_end + program, mix_end, programs, disable_licm=True):
            tile = tiles + index * fields.I_WIDTH
            mix_tile(table, constants, tile, workspace, partials, with_grad, factors, factor, TF32, BY_PRODUCTS)
        if mix_end > gram_end:
            grid_barrier(arrivals, target)
            target += programs
        if index_of_pass == passes - 1:
            for index in tl.range(program, count, programs, disable_licm=True):
                reduce_loss(table, loss_rows, index, partials, losses, LANES)
        for index in tl.range(mix_end + program, apply_end, programs, disable_licm=True):
            tile = tiles + index * fields.I_WIDTH
            apply_any(
                table, tile, weights, workspace, grads, targets, PLANE, PRECISION, TILE, WIDTH, DEPTH, LANES, ADDS
            )
        if gather_end > apply_end:
            grid_barrier(arrivals, target)
            target += programs
            for index in tl.range(apply_end + program, gather_end, programs, disable_licm=True):
                tile = tiles + index * fields.I_WIDTH
                gather_any(table, constants, tile, workspace, grads, targets, ROWS, GATHERED_COLUMNS, ADDS, BY_PRODUCTS)
        if index_of_pass < passes - 1:  # the next pass writes what this one reads
            grid_barrier(arrivals, target)
            target += programs
