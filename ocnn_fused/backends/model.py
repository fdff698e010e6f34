"""A roofline of the devices, for choosing plans: counted work over published rates, no measurement.

The time of a stage is the largest of its products at the tensor cores' rate, its elementwise arithmetic at the float32
rate and its traffic at the memory's rate; stages add up, and so do launches. Traffic goes at the rate of the L2 cache
while a layer's planes and outputs fit into half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..plan import Plan
from ..problem import Precision
from .device import DeviceSpec


@dataclass(frozen=True)
class Stage:
    """Counted work of one stage over all groups of one layer."""

    name: str
    products: int  # multiply-adds in tensor cores, in whole tiles
    elementwise: int  # multiply-adds outside
    bytes: int


def stages(plan: Plan, precision: Precision = "tf32", with_grad: bool = True, weight_bytes: int = 4) -> list[Stage]:
    """Work of the stages that a GPU backend runs for a plan, skipped ones left out.

    Each operand of a product counts once: re-reads by neighbouring tiles are taken to hit the L2 cache.
    """
    item = 2 if precision == "bf16" else 4
    weights = plan.groups * plan.rows * plan.channels * prod(axis.taps for axis in plan.axes)
    area, lags = plan.groups * plan.work_rows**2, len(plan.lags)
    if plan.small:
        gram = plan.work.multiply_adds // 3
        work = [Stage("gram", 0, gram, weights * weight_bytes + 4 * area * lags)]
        if with_grad:
            work.append(Stage("apply", 0, 2 * gram, 2 * weights * weight_bytes + 4 * area * lags))
        return work
    planes = sum(plan.groups * plan.rows * plan.channels * block.planes * block.residues for block in plan.blocks)
    per_tap = sum(plan.groups * plan.rows * plan.channels * b.planes * b.taps * b.residues for b in plan.blocks)
    linear = 0 if plan.is_diagonal else per_tap
    gram, apply = product_work(plan)
    work = []
    if not plan.is_flat or precision == "tf32":  # there no weight is its own plane: operands are rounded
        work.append(Stage("evaluate", 0, linear, weights * weight_bytes + planes * item))
    work.append(Stage("gram", gram, 0, planes * item + 4 * area * plan.outputs))
    if not plan.is_diagonal:
        mixed = area * lags * plan.outputs
        work.append(Stage("mix", 0, mixed * (2 if with_grad else 1), 4 * area * plan.outputs * (2 if with_grad else 1)))
    if with_grad:
        work.append(Stage("apply", apply, 0, 4 * area * plan.outputs + planes * (item + 4)))
        if not plan.is_flat:
            work.append(Stage("gather", 0, linear, weights * weight_bytes + planes * 4))
    return work


#: Products are made of tiles of this side and depth, and computed whole.
TILE_SIDE, TILE_DEPTH = 64, 32


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


def stage_seconds(stage: Stage, spec: DeviceSpec, precision: Precision, resident_bytes: int) -> float:
    """Modelled time of one stage; ``resident_bytes`` of the layer decide whether L2 or memory serves its traffic."""
    rate = spec.l2_bandwidth if resident_bytes <= spec.l2_bytes // 2 else spec.bandwidth
    matmul = spec.matmul[precision] * spec.efficiency
    # With the products of `ieee` on the ordinary units, arithmetic of both kinds shares them.
    return max(stage.products / matmul, stage.elementwise / (spec.elementwise * spec.efficiency), stage.bytes / rate)


@lru_cache(maxsize=16384)
def plan_seconds(plan: Plan, spec: DeviceSpec, precision: Precision, with_grad: bool = True) -> float:
    """Modelled time of one layer without launches."""
    work = stages(plan, precision, with_grad)
    resident = max(stage.bytes for stage in work)
    return sum(stage_seconds(stage, spec, precision, resident) for stage in work)
