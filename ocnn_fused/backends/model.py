"""A model of the devices, for choosing plans: counted work over published rates, no measurement.

A stage takes as long as what it needs most of: products at the tensor cores' rate, instructions at the rate at which
they are issued, bytes to and from memory, and bytes from the L2 cache, where tiles of products read every operand
again. A launch does one stage of all layers of a list, so that each need is summed over them. Stages add up, and so do
launches. Of what a stage reads of the stage before it, half of the L2 cache still holds as much as it can, because
every stage begins with what the one before it did last; the rest goes to memory and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..plan import Plan
from ..problem import Precision
from .device import DeviceSpec

#: Instructions that a thread executes for each CHUNK multiply-adds of a 3x3 layer in float32, counted for sm_80 and
#: sm_90 with triton 3.7 by `make gpu-check`. evaluate: all in its loops, 41.5 in the inner one (those that read half
#: types included) and 21.2, shared out, that round and store. mix and gather: those of the inner loop (29 and 31) and,
#: estimated, the rest.
INSTRUCTIONS = {"evaluate": 63.0, "mix": 42.0, "gather": 40.0}
#: The same with matrix instructions, for as many multiply-adds. Of evaluate and mix all are counted: 36.0 and 19.6 for
#: sm_80, 32.1 and 17.1 for sm_90. The inner loop of gather has 18 and 13, to which come as many as without.
BY_PRODUCTS = {"evaluate": 36.5, "mix": 20.0, "gather": 27.0}
BY_PRODUCTS_HOPPER = {"evaluate": 32.5, "mix": 17.5, "gather": 22.0}
CHUNK = 16
#: Channels, or a multiple of them, that begin on a boundary.
ALIGN = 8
#: Products of high and low bits that these stages then make of one; mix only of at most MIXED_BY_PRODUCTS outputs,
#: evaluate only of more than half a CHUNK of taps and at most one.
SPLIT_PRODUCTS = 3
MIXED_BY_PRODUCTS = 32


@dataclass(frozen=True)
class Stage:
    """Counted work of one stage over all groups of one layer."""

    name: str
    products: int  # multiply-adds in tensor cores, in whole tiles
    elementwise: int  # multiply-adds outside, padded as they are executed
    bytes: int  # each operand once
    carried: int = 0  # of these, what the stage before has written
    read_again: int = 0  # bytes that tiles of products read, each operand once per tile
    per_chunk: float = 2.0 * CHUNK  # instructions of a thread for CHUNK elementwise multiply-adds


def stages(
    plan: Plan,
    precision: Precision = "tf32",
    with_grad: bool = True,
    weight_bytes: int = 4,
    accumulate: bool = False,
    spec: DeviceSpec | None = None,
) -> list[Stage]:
    """Work of the stages that a GPU backend runs for a plan, skipped ones left out; some depend on the device.

    With ``accumulate`` gradients are added to what is there, which is read as well.
    """
    wide_tiles = spec is not None and spec.has_wide_tiles
    by_products = spec is not None and spec.has_fast_products and precision == "tf32"
    # Hopper's matrix instructions of as few columns are taken to reach half of the rate.
    parts, per_product = (2 * SPLIT_PRODUCTS, BY_PRODUCTS_HOPPER) if wide_tiles else (SPLIT_PRODUCTS, BY_PRODUCTS)
    item = 2 if precision == "bf16" else 4
    weights = plan.groups * plan.rows * plan.channels * prod(axis.taps for axis in plan.axes)
    grads = weights * weight_bytes * (2 if accumulate else 1)
    area, lags = plan.groups * plan.work_rows**2, len(plan.lags)
    if plan.small:
        gram = plan.work.multiply_adds // 3
        work = [Stage("gram", 0, gram, weights * weight_bytes + 4 * area * lags)]
        if with_grad:
            work.append(Stage("apply", 0, 2 * gram, weights * weight_bytes + grads + 4 * area * lags))
        return work
    elements = plan.groups * plan.rows * plan.channels
    planes = sum(elements * block.planes * block.residues for block in plan.blocks)
    outputs = 4 * area * plan.outputs
    gram, apply = product_work(plan)
    rows, columns = tile_sides(plan, wide_tiles)
    again = item * gram // rows + item * gram // columns, item * apply // rows + 4 * apply // columns
    diagonal = plan.is_diagonal
    work = []
    if not plan.is_flat or precision == "tf32":  # there no weight is its own plane: operands are rounded
        made = 0 if diagonal else sum(elements * b.residues * b.taps * _padded(b.planes) for b in plan.blocks)
        moved = weights * weight_bytes + planes * item
        split, per_chunk = 0, INSTRUCTIONS["evaluate"]
        whole_chunks = weight_bytes == 4 and all(CHUNK // 2 < block.taps <= CHUNK for block in plan.blocks)
        if by_products and whole_chunks and _planes_lie_well(plan):
            split, per_chunk = parts * _whole_products(plan, elements), per_product["evaluate"]
        work.append(Stage("evaluate", split, made, moved, per_chunk=per_chunk))
    work.append(Stage("gram", gram, 0, planes * item + outputs, planes * item if work else 0, again[0]))
    if not diagonal:
        mixed = area * _padded(plan.outputs) * (plan.outputs + (lags if with_grad else 0))
        split, per_chunk = 0, INSTRUCTIONS["mix"]
        if by_products and plan.outputs <= MIXED_BY_PRODUCTS:
            split = parts * area * _padded(plan.outputs) ** 2 * (2 if with_grad else 1)
            per_chunk = per_product["mix"]
        work.append(Stage("mix", split, mixed, outputs * (2 if with_grad else 1), outputs, per_chunk=per_chunk))
    if with_grad:
        in_place = grads if plan.is_flat else planes * 4
        work.append(Stage("apply", apply, 0, outputs + planes * item + in_place, outputs, again[1]))
        if not plan.is_flat:
            gathered = 0 if diagonal else sum(elements * b.residues * b.planes * _padded(b.taps) for b in plan.blocks)
            split, per_chunk = 0, INSTRUCTIONS["gather"]
            if by_products and _planes_lie_well(plan):
                split, per_chunk = parts * _whole_products(plan, elements), per_product["gather"]
            work.append(Stage("gather", split, gathered, grads + planes * 4, planes * 4, per_chunk=per_chunk))
    return work


def _planes_lie_well(plan: Plan) -> bool:
    """Whether evaluate and gather can use matrix instructions: neighbouring channels, residues on a boundary.

    Columns lie the other way round.
    """
    aligned = plan.channels % ALIGN == 0 or all(block.residues == 1 for block in plan.blocks)
    return plan.side == "row" and not plan.is_diagonal and aligned


def _whole_products(plan: Plan, elements: int) -> int:
    """Multiply-adds of taps and planes, both in whole chunks."""
    return sum(elements * b.residues * _padded(b.planes) * _padded(b.taps) for b in plan.blocks)


def _padded(count: int) -> int:
    """To whole chunks, which are computed."""
    return -(-count // CHUNK) * CHUNK


#: Products are made of tiles of this side and depth, and computed whole.
TILE_SIDE, TILE_DEPTH = 64, 32
#: Their side where there are as many rows: it halves what is read again.
LARGE_TILE_SIDE = 128


#: Columns of the tiles that some devices make wider, where there are as many.
WIDE_TILE = 256


def tile_sides(plan: Plan, wide_tiles: bool) -> tuple[int, int]:
    """Rows and columns of the tiles of most products."""
    narrowest = min(plan.work_rows, *(plan.contraction(product) for product in plan.products))
    if wide_tiles and not plan.is_diagonal and narrowest >= WIDE_TILE:
        return LARGE_TILE_SIDE, WIDE_TILE
    side = LARGE_TILE_SIDE if plan.work_rows >= LARGE_TILE_SIDE else TILE_SIDE
    return side, side


def product_work(
    plan: Plan, tile_side: int = TILE_SIDE, tile_depth: int = TILE_DEPTH, tile_width: int = 0
) -> tuple[int, int]:
    """Multiply-adds of gram, of symmetric outputs only tiles on and above the diagonal, and of apply.

    ``tile_width``, if not 0, is that of tiles of which nothing but the product is wanted.
    """
    gram = apply = 0
    across = -(-plan.work_rows // tile_side)
    width = tile_side if plan.is_diagonal or not tile_width else tile_width
    for product in plan.products:
        length = plan.contraction(product)
        steps = -(-length // tile_depth) * tile_depth * tile_side
        if symmetric := plan.self_paired[product.out]:
            gram += plan.groups * steps * across * (across + 1) // 2 * tile_side
        else:
            gram += plan.groups * steps * across * -(-plan.work_rows // width) * width
        side = -(-plan.work_rows // tile_depth) * tile_depth
        along = -(-length // width) * width
        apply += plan.groups * side * across * tile_side * along * (1 if symmetric else 2)
    return gram, apply


def workspace_bytes(plan: Plan, precision: Precision = "tf32", with_grad: bool = True) -> int:
    """Planes, outputs and planes' gradients, without padding."""
    outputs = 4 * plan.groups * plan.work_rows**2 * plan.outputs
    if plan.small:
        return outputs
    planes = sum(plan.groups * plan.rows * plan.channels * block.planes * block.residues for block in plan.blocks)
    return outputs + planes * ((2 if precision == "bf16" else 4) + (4 if with_grad else 0))


def needs(work: Sequence[Stage], spec: DeviceSpec, precision: Precision) -> dict[str, float]:
    """Seconds that one launch, a stage of some layers, would take for each thing it needs, were that all it needs."""
    instructions = sum(stage.elementwise * stage.per_chunk for stage in work) / CHUNK
    found = min(spec.l2_bytes // 2, sum(stage.carried for stage in work))
    return {
        "products": sum(stage.products for stage in work) / (spec.matmul[precision] * spec.efficiency),
        "instructions": instructions / (spec.issue * spec.efficiency),
        "memory": (sum(stage.bytes for stage in work) - found) / spec.bandwidth,
        "cache": sum(max(stage.bytes, stage.read_again) for stage in work) / spec.l2_bandwidth,
    }


def launches(
    plans: Sequence[Plan], spec: DeviceSpec, precision: Precision, with_grad: bool = True, accumulate: bool = False
) -> dict[str, dict[str, float]]:
    """What each stage of a list needs, by the stage's name: see :func:`needs`."""
    by_name: dict[str, list[Stage]] = {}
    for plan in plans:
        for stage in stages(plan, precision, with_grad, accumulate=accumulate, spec=spec):
            by_name.setdefault(stage.name, []).append(stage)
    return {name: needs(work, spec, precision) for name, work in by_name.items()}


def list_seconds(
    plans: Sequence[Plan], spec: DeviceSpec, precision: Precision, with_grad: bool = True, accumulate: bool = False
) -> float:
    """Modelled time of a list of layers, stage by stage, without launches."""
    stages_needs = launches(plans, spec, precision, with_grad, accumulate)
    return sum(max(needed.values()) for needed in stages_needs.values())


@lru_cache(maxsize=16384)
def plan_seconds(plan: Plan, spec: DeviceSpec, precision: Precision, with_grad: bool = True) -> float:
    """Modelled time of one layer without launches."""
    return list_seconds([plan], spec, precision, with_grad)


#: Workspace of one pass over a list, in MB: at most that much, unless one layer alone needs more.
PASS_MEGABYTES = 160


def split_into_passes(sizes: Sequence[int], limit: int) -> tuple[range, ...]:
    """Places of neighbours whose sizes together stay within the limit, or within the largest of all."""
    limit = max(limit, *sizes)
    found: list[range] = []
    first = used = 0
    for place, size in enumerate(sizes):
        if used + size > limit:
            found.append(range(first, place))
            first, used = place, 0
        used += size
    return (*found, range(first, len(sizes)))


@lru_cache(maxsize=16384)
def seconds_in_list(plan: Plan, spec: DeviceSpec, precision: Precision) -> float:
    """Modelled time of one layer among others, by which its plan is chosen: the cache is shared like the workspace."""
    share = min(1.0, workspace_bytes(plan, precision) / (PASS_MEGABYTES << 20))
    return list_seconds([plan], replace(spec, l2_bytes=int(share * spec.l2_bytes)), precision)
