"""A model of the devices, for choosing plans: counted work over published rates, no measurement.

A stage takes as long as what it needs most of: products at the tensor cores' rate, instructions at the rate at which
they are issued, bytes to and from memory, and bytes from the L2 cache, where tiles of products read every operand
again. A launch does one stage of all layers of a list, so that each need is summed over them. Stages add up, and so do
launches. Of what a stage reads of the stage before it, half of the L2 cache still holds as much as it can, because
every stage begins with what the one before it did last; the rest goes to memory and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..plan import Plan
from ..problem import Precision
from .device import DeviceSpec

#: Instructions that a thread executes for each CHUNK multiply-adds of a 3x3 layer in float32: those of the inner loop
#: (33, 29 and 31, counted by `make gpu-check` for sm_80 to sm_90 with triton 3.7) and, estimated, those that round and
#: store the results, shared out among them.
INSTRUCTIONS = {"evaluate": 52.0, "mix": 42.0, "gather": 40.0}
CHUNK = 16


@dataclass(frozen=True)
class Stage:
    """Counted work of one stage over all groups of one layer."""

    name: str
    products: int  # multiply-adds in tensor cores, in whole tiles
    elementwise: int  # multiply-adds outside, padded as they are executed
    bytes: int  # each operand once
    carried: int = 0  # of these, what the stage before has written
    read_again: int = 0  # bytes that tiles of products read, each operand once per tile


def stages(
    plan: Plan, precision: Precision = "tf32", with_grad: bool = True, weight_bytes: int = 4, accumulate: bool = False
) -> list[Stage]:
    """Work of the stages that a GPU backend runs for a plan, skipped ones left out.

    With ``accumulate`` gradients are added to what is there, which is read as well.
    """
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
    again = 2 * item * gram // tile_side(plan), (item + 4) * apply // tile_side(plan)
    diagonal = plan.is_diagonal
    work = []
    if not plan.is_flat or precision == "tf32":  # there no weight is its own plane: operands are rounded
        made = 0 if diagonal else sum(elements * b.residues * b.taps * _padded(b.planes) for b in plan.blocks)
        work.append(Stage("evaluate", 0, made, weights * weight_bytes + planes * item))
    work.append(Stage("gram", gram, 0, planes * item + outputs, planes * item if work else 0, again[0]))
    if not diagonal:
        mixed = area * _padded(plan.outputs) * (plan.outputs + (lags if with_grad else 0))
        work.append(Stage("mix", 0, mixed, outputs * (2 if with_grad else 1), outputs))
    if with_grad:
        in_place = grads if plan.is_flat else planes * 4
        work.append(Stage("apply", apply, 0, outputs + planes * item + in_place, outputs, again[1]))
        if not plan.is_flat:
            gathered = 0 if diagonal else sum(elements * b.residues * b.planes * _padded(b.taps) for b in plan.blocks)
            work.append(Stage("gather", 0, gathered, grads + planes * 4, planes * 4))
    return work


def _padded(count: int) -> int:
    """To whole chunks, which are computed."""
    return -(-count // CHUNK) * CHUNK


#: Products are made of tiles of this side and depth, and computed whole.
TILE_SIDE, TILE_DEPTH = 64, 32
#: Their side where there are as many rows: it halves what is read again.
LARGE_TILE_SIDE = 128


def tile_side(plan: Plan) -> int:
    return LARGE_TILE_SIDE if plan.work_rows >= LARGE_TILE_SIDE else TILE_SIDE


def product_work(plan: Plan, tile_side: int = TILE_SIDE, tile_depth: int = TILE_DEPTH) -> tuple[int, int]:
    """Multiply-adds of gram, of symmetric outputs only tiles on and above the diagonal, and of apply."""
    gram = apply = 0
    across = -(-plan.work_rows // tile_side)
    for product in plan.products:
        length = plan.contraction(product)
        steps = -(-length // tile_depth) * tile_depth * tile_side**2
        symmetric = plan.self_paired[product.out]
        gram += plan.groups * steps * (across * (across + 1) // 2 if symmetric else across**2)
        side = -(-plan.work_rows // tile_depth) * tile_depth
        along = -(-length // tile_side)
        apply += plan.groups * side * across * along * tile_side**2 * (1 if symmetric else 2)
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
    per_chunk = INSTRUCTIONS.get(work[0].name, 2.0 * CHUNK)
    instructions = sum(stage.elementwise for stage in work) * per_chunk / CHUNK
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
        for stage in stages(plan, precision, with_grad, accumulate=accumulate):
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
