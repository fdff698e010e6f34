"""A roofline of the devices: which plan, and one launch or several. Counted work over published rates, no measurement.

The time of a stage is the largest of its products at the tensor cores' rate, its elementwise arithmetic at the float32
rate and its traffic at the memory's rate; stages add up, and so do launches. Traffic goes at the rate of the L2 cache
while a layer's planes and outputs fit into half of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from ...plan import Plan, Rates
from ..rounding import is_accurate
from .config import MIX_SIZES, SHIPPED, SHIPPED_AMD, Config


@dataclass(frozen=True)
class DeviceSpec:
    """Published rates of one device; multiply-adds and bytes per second, dense."""

    name: str
    multiprocessors: int
    matmul: Mapping[str, float]  # by precision
    elementwise: float  # float32 multiply-adds outside the tensor cores
    bandwidth: float
    l2_bytes: int
    l2_bandwidth: float
    efficiency: float = 0.6  # share of the product rate that tiles of this size reach
    launch: float = 4e-6  # one kernel launch, including the gap that it leaves
    barrier: float = 2e-6  # one barrier of the whole grid

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("MI")

    @property
    def shipped(self) -> dict[str, tuple[Config, ...]]:
        """Configurations by precision."""
        return SHIPPED_AMD if self.is_amd else SHIPPED

    def native_precision(self, precision: str) -> str:
        """AMD's matrix units take float32 as it is, so there is nothing to gain from TF32."""
        return precision if precision in self.matmul else "ieee"


def _spec(
    name: str,
    multiprocessors: int,
    fp32: float,
    tf32: float,
    bf16: float,
    bandwidth: float,
    l2_mb: float,
    l2_bandwidth: float,
) -> DeviceSpec:
    """Rates in the units of data sheets: TFLOP/s (two per multiply-add), TB/s, MB."""
    half = 0.5e12
    matmul = {"ieee": fp32 * half, "tf32x3": tf32 / 3 * half, "tf32": tf32 * half, "bf16": bf16 * half}
    return DeviceSpec(
        name, multiprocessors, matmul, fp32 * half, bandwidth * 1e12, int(l2_mb * 2**20), l2_bandwidth * 1e12
    )


#: Data-sheet rates, dense. GTX 1080 Ti and T4 have no TF32, so that every precision is `ieee` there. Triton serves
#: neither; the first is what papers of the time measured on, the second what the CUDA backend serves.
SPECS: dict[str, DeviceSpec] = {
    "A100": _spec("A100", 108, 19.5, 156, 312, 1.555, 40, 4.5),
    "H100": _spec("H100", 132, 67, 495, 989, 3.35, 50, 7.0),
    "RTX 4090": _spec("RTX 4090", 128, 82.6, 82.6, 165, 1.008, 72, 5.0),
    "GTX 1080 Ti": DeviceSpec("GTX 1080 Ti", 28, {"ieee": 5.65e12}, 5.65e12, 0.484e12, int(2.75 * 2**20), 1.2e12),
    "T4": DeviceSpec("T4", 40, {"ieee": 4.05e12}, 4.05e12, 0.32e12, 4 << 20, 1.3e12),
    "MI250": DeviceSpec("MI250", 104, {"ieee": 22.6e12, "bf16": 90e12}, 11.3e12, 1.6e12, 8 << 20, 3.0e12),
    "MI300X": DeviceSpec("MI300X", 304, {"ieee": 81.7e12, "bf16": 653e12}, 40.8e12, 5.3e12, 256 << 20, 10e12),
}

#: What an unnamed device is taken for: the latest of these that is not newer than it.
_BY_CAPABILITY = {
    (0, 0): "GTX 1080 Ti",
    (7, 5): "T4",
    (8, 0): "A100",
    (8, 6): "RTX 4090",
    (9, 0): "H100",
    (12, 0): "RTX 4090",
}


def spec_of(device: torch.device | str) -> DeviceSpec:
    """The spec of a device: by name, by what torch says of it, or the nearest relative. A CPU stands for an A100."""
    if isinstance(device, str) and device in SPECS:
        return SPECS[device]
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return SPECS["A100"]
    return _cuda_spec(_index(device))


def device_name(device: torch.device | str) -> str:
    """The device's own name and architecture: what measurements on it are kept under."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties = torch.cuda.get_device_properties(_index(device))
    if torch.version.hip is not None:
        return f"{properties.name} ({properties.gcnArchName})"
    return f"{properties.name} (sm_{properties.major}{properties.minor})"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@lru_cache(maxsize=16)
def _cuda_spec(index: int) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return SPECS["MI300X" if "gfx94" in properties.gcnArchName else "MI250"]
    # As a word of its own: "A100" is in "NVIDIA A100-SXM4-80GB", but not in "NVIDIA RTX A1000".
    named = (spec for name, spec in SPECS.items() if re.search(rf"\b{name}\b", properties.name))
    capability = (properties.major, properties.minor)
    relative = max(known for known in _BY_CAPABILITY if known <= capability)
    return next(named, SPECS[_BY_CAPABILITY[relative]])


#: For the first choice of a plan, before the device is known; an A100 in TF32. Launches are shared by a whole network.
GPU_RATES = Rates("triton", 47e12, 64.0, 9.75e12, 1.5e12, 0.0, 1e12, 1)


@dataclass(frozen=True)
class Stage:
    """Counted work of one stage over all groups of one layer."""

    name: str
    products: int  # multiply-adds in tensor cores, in whole tiles
    elementwise: int  # multiply-adds outside
    bytes: int


def stages(plan: Plan, precision: str = "tf32", with_grad: bool = True, weight_bytes: int = 4) -> list[Stage]:
    """Work of the stages that the Triton backend runs for a plan, skipped ones left out.

    Each operand of a product counts once: re-reads by neighbouring tiles are taken to hit the L2 cache.
    """
    item = 2 if precision == "bf16" else 4
    weights = plan.groups * plan.rows * plan.channels * prod(axis.taps for axis in plan.axes)
    side, lags = plan.work_rows, len(plan.lags)
    area = plan.groups * side * side
    if plan.small:
        gram = plan.cost.multiply_adds // 3
        work = [Stage("gram", 0, gram, weights * weight_bytes + 4 * area * lags)]
        if with_grad:
            work.append(Stage("apply", 0, 2 * gram, 2 * weights * weight_bytes + 4 * area * lags))
        return work
    planes = sum(plan.groups * plan.rows * plan.channels * block.planes * block.residues for block in plan.blocks)
    in_place = plan.is_flat
    per_tap = sum(plan.groups * plan.rows * plan.channels * b.planes * b.taps * b.residues for b in plan.blocks)
    linear = 0 if plan.is_diagonal else per_tap
    gram, apply = product_work(plan)
    work = []
    if not in_place:
        work.append(Stage("evaluate", 0, linear, weights * weight_bytes + planes * item))
    work.append(Stage("gram", gram, 0, planes * item + 4 * area * plan.outputs))
    if not plan.is_diagonal:
        mixed = area * lags * plan.outputs
        work.append(Stage("mix", 0, mixed * (2 if with_grad else 1), 4 * area * plan.outputs * (2 if with_grad else 1)))
    if with_grad:
        work.append(Stage("apply", apply, 0, 4 * area * plan.outputs + planes * (item + 4)))
        if not in_place:
            work.append(Stage("gather", 0, linear, weights * weight_bytes + planes * 4))
    return work


#: Products are made of tiles of this side and depth, and computed whole.
TILE_SIDE, TILE_DEPTH = 64, 32


def product_work(plan: Plan, tile_side: int = TILE_SIDE, tile_depth: int = TILE_DEPTH) -> tuple[int, int]:
    """Multiply-adds of gram, of symmetric outputs only tiles on and above the diagonal, and of apply."""
    gram = apply = 0
    across = -(-plan.work_rows // tile_side)
    for block, _, _, out in plan.products:
        length = plan.rows if plan.side == "column" else plan.channels * plan.blocks[block].residues
        steps = -(-length // tile_depth) * tile_depth * tile_side**2
        symmetric = plan.self_paired[out]
        gram += plan.groups * steps * (across * (across + 1) // 2 if symmetric else across**2)
        side = -(-plan.work_rows // tile_depth) * tile_depth
        along = -(-length // tile_side)
        apply += plan.groups * side * across * along * tile_side**2 * (1 if symmetric else 2)
    return gram, apply


def stage_seconds(stage: Stage, spec: DeviceSpec, precision: str, resident_bytes: int) -> float:
    """Modelled time of one stage; ``resident_bytes`` of the layer decide whether L2 or memory serves its traffic."""
    rate = spec.l2_bandwidth if resident_bytes <= spec.l2_bytes // 2 else spec.bandwidth
    matmul = spec.matmul[precision] * spec.efficiency
    # With the products of `ieee` on the ordinary units, arithmetic of both kinds shares them.
    return max(stage.products / matmul, stage.elementwise / (spec.elementwise * spec.efficiency), stage.bytes / rate)


@lru_cache(maxsize=16384)
def plan_seconds(plan: Plan, spec: DeviceSpec, precision: str, with_grad: bool = True) -> float:
    """Modelled time of one layer without launches."""
    work = stages(plan, precision, with_grad)
    resident = max(stage.bytes for stage in work)
    return sum(stage_seconds(stage, spec, precision, resident) for stage in work)


def refusal(plan: Plan, precision: str, dtype: torch.dtype = torch.float32) -> str | None:
    """Why a plan is never chosen for weights of ``dtype`` in this precision, or None; a direct plan always serves."""
    if not plan.is_diagonal and plan.outputs > MIX_SIZES[-1]:
        return f"{plan.outputs} outputs, at most {MIX_SIZES[-1]} can be mixed"
    if not is_accurate(plan, precision, dtype):
        return f"not accurate enough in {precision}"
    return None


@lru_cache(maxsize=4096)
def choose_plan(plan: Plan, spec: DeviceSpec, precision: str, dtype: torch.dtype = torch.float32) -> Plan:
    """Of the candidates that serve, the one with the least modelled time on this device."""
    candidates = [one for one in (plan, *plan.alternatives) if refusal(one, precision, dtype) is None]
    return min(candidates, key=lambda candidate: plan_seconds(candidate, spec, precision))


def _described(device: torch.device | str, spec: DeviceSpec) -> str:
    """The spec's name, and whose rates they are taken for if the device has another name."""
    if isinstance(device, str) and device in SPECS:
        return spec.name
    name = device_name(device)
    return spec.name if re.search(rf"\b{spec.name}\b", name) else f"{name}, taken for {spec.name}"


def explain(plan: Plan, device: torch.device | str, precision: str = "tf32") -> str:
    """The choice on a device, one line per candidate, cheapest first; every time is modelled."""
    spec = spec_of(device)
    precision = spec.native_precision(precision)
    chosen = choose_plan(plan, spec, precision)
    lines = [
        f"{_described(device, spec)}, {precision} (modelled, not measured)",
        f"{'plan':<14}{'products':>10}{'mult-adds':>12}{'elementwise':>13}{'MB moved':>10}{'modelled us':>13}",
    ]
    candidates = sorted((plan, *plan.alternatives), key=lambda candidate: plan_seconds(candidate, spec, precision))
    for candidate in candidates:
        work = stages(candidate, precision)
        remark = "<- chosen" if candidate is chosen else refusal(candidate, precision)
        lines.append(
            f"{candidate.name:<14}{len(candidate.products):>10}{sum(s.products for s in work) / 1e6:>11.4g}M"
            f"{sum(s.elementwise for s in work) / 1e6:>12.4g}M{sum(s.bytes for s in work) / 1e6:>10.4g}"
            f"{plan_seconds(candidate, spec, precision) * 1e6:>13.2f}{f'   {remark}' if remark else ''}"
        )
    return "\n".join(lines)


#: Launches that the single kernel saves: four of at most five.
SAVED_LAUNCHES = 4
#: Barriers that it adds.
ADDED_BARRIERS = 4
#: What it loses otherwise, as a share of the work: all stages run with the resources of the greediest.
SINGLE_LOSS = 0.25


def prefer_single(plans: Sequence[Plan], spec: DeviceSpec, precision: str) -> bool:
    """One launch pays while the launches it saves cost more than its barriers and its lower occupancy."""
    work = sum(plan_seconds(plan, spec, precision) for plan in plans)
    return SAVED_LAUNCHES * spec.launch > ADDED_BARRIERS * spec.barrier + SINGLE_LOSS * work
