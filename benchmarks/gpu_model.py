"""Modelled GPU times of the reference and of the fused loss: counted FLOPs, bytes and launches over published rates.

    python benchmarks/gpu_model.py                    every network on every device
    python benchmarks/gpu_model.py --precision ieee   with full float32 products

No GPU is used and nothing is measured: every figure is a model, and says so. ``compare.py --device cuda`` measures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from shapes import NETWORKS, Layer

from ocnn_fused import engine
from ocnn_fused.backends.device import SPECS, DeviceSpec
from ocnn_fused.backends.model import launches, plan_seconds, split_into_passes, workspace_bytes
from ocnn_fused.backends.triton import workspace_limit
from ocnn_fused.backends.triton.config import BARRIERS, SINGLE_LOSS, STAGED_LAUNCHES, prefer_single
from ocnn_fused.plan import Plan, candidates
from ocnn_fused.problem import Options, Precision
from ocnn_fused.regularizer.distributed import balanced_shares

DEVICES = ("A100", "H100", "RTX 4090", "GTX 1080 Ti")

#: Launches per layer of the reference: convolution, target (zeros, eye, copy), subtract, square, sum; and backward of
#: each with the two gradients of the convolution and their sum.
REFERENCE_LAUNCHES = 14
#: Times the reference's output goes through memory in its elementwise steps, forward and backward.
REFERENCE_PASSES = 9
#: Share of the product rate that a convolution with as few output positions as the self-convolution reaches in cuDNN.
CONVOLUTION_EFFICIENCY = 0.4
STAGES = ("evaluate", "gram", "mix", "apply", "gather")

#: ResNet-34 at 224x224: multiply-adds of one image forward (published: 3.66 G); a training step costs three times that.
RESNET34_FORWARD = 3.66e9
BATCH = 256
TRAINING_EFFICIENCY = 0.4
#: Ranks that share the layers among them.
WORLD = 8


@dataclass(frozen=True)
class Modelled:
    """Seconds, all modelled."""

    reference: float
    fused: float
    launches: int

    @property
    def ratio(self) -> float:
        return self.reference / self.fused


def reference_seconds(layer: Layer, spec: DeviceSpec, precision: Precision) -> float:
    """``F.conv2d`` of the kernel with itself and autograd, zero padding computed as cuDNN's implicit GEMM does."""
    plan = candidates(layer.problem)[0]  # any of them: only the layer counts
    positions = prod(2 * axis.lags + 1 for axis in plan.axes)
    output_bytes = 4 * plan.groups * plan.rows**2 * positions
    weight_bytes = 4 * prod(layer.shape)
    products = plan.reference_multiply_adds / (spec.matmul[precision] * CONVOLUTION_EFFICIENCY)
    traffic = (REFERENCE_PASSES * output_bytes + 6 * weight_bytes) / spec.bandwidth
    return products + traffic + REFERENCE_LAUNCHES * spec.launch


def plans_of(layers: Sequence[Layer], spec: DeviceSpec, precision: Precision) -> list[Plan]:
    """The plan of every convolution, as the Triton backend chooses them."""
    options = Options(backend="triton", precision=precision)
    chosen = [engine.choose(layer.problem, torch.float32, spec.name, options).plan for layer in layers]
    counted = zip(layers, chosen, strict=True)
    return [plan for layer, plan in counted for _ in range(layer.count) if isinstance(plan, Plan)]


def passes(plans: Sequence[Plan], precision: Precision) -> list[list[Plan]]:
    """What is computed together, within the limit of the workspace."""
    sizes = [workspace_bytes(plan, precision) for plan in plans]
    return [[plans[place] for place in one] for one in split_into_passes(sizes, workspace_limit())]


@dataclass(frozen=True)
class Launches:
    """How a list is launched: stage by stage, or all at once with barriers between the stages."""

    passes: list[list[Plan]]
    single: bool

    @classmethod
    def of(cls, plans: Sequence[Plan], spec: DeviceSpec, precision: Precision) -> Launches:
        """As the Triton backend does by itself."""
        found = passes(plans, precision)
        return cls(found, prefer_single(plans, spec, precision, len(found)))

    @property
    def count(self) -> int:
        return 1 if self.single else STAGED_LAUNCHES * len(self.passes)

    @property
    def barriers(self) -> int:
        return BARRIERS * len(self.passes) - 1 if self.single else 0

    def seconds(self, spec: DeviceSpec) -> float:
        """Without the stages' work."""
        return self.count * spec.launch + self.barriers * spec.barrier

    def loss(self, stage: str, spec: DeviceSpec, precision: Precision) -> float:
        """Share of its work that a stage loses where more programs of it alone would share a multiprocessor."""
        large = len(self.passes) > 1
        as_alone = stage in ("gram", "apply") or (precision == "tf32" and spec.has_fast_products)
        return SINGLE_LOSS if self.single and not (large and as_alone) else 0.0

    def work(
        self, spec: DeviceSpec, precision: Precision, accumulate: bool = False
    ) -> list[tuple[str, dict[str, float], float]]:
        """Stages of all passes: name, needs and the seconds it takes."""
        return [
            (name, needs, max(needs.values()) * (1 + self.loss(name, spec, precision)))
            for one in self.passes
            for name, needs in launches(one, spec, precision, accumulate=accumulate).items()
        ]


def fused_seconds(layers: Sequence[Layer], spec: DeviceSpec, precision: Precision) -> tuple[float, int]:
    """All layers in one call, and the number of launches; with backward, which multiplies all gradients by one."""
    plans = plans_of(layers, spec, precision)
    weight_bytes = sum(4 * prod(layer.shape) * layer.count for layer in layers)
    backward = spec.launch + 2 * weight_bytes / spec.bandwidth
    how = Launches.of(plans, spec, precision)
    return sum(took for *_, took in how.work(spec, precision)) + how.seconds(spec) + backward, how.count + 1


def added_seconds(plans: Sequence[Plan], spec: DeviceSpec, precision: Precision, staged: bool = False) -> float:
    """``add_grad_``: gradients are added to what is in ``.grad``; there is no backward."""
    how = Launches(passes(plans, precision), single=False) if staged else Launches.of(plans, spec, precision)
    return sum(took for *_, took in how.work(spec, precision, accumulate=True)) + how.seconds(spec)


def sharded_seconds(plans: Sequence[Plan], spec: DeviceSpec, precision: Precision, world: int) -> float:
    """``add_grad_`` with layers shared out among ranks: the time of the slowest, without what they send each other."""
    costs = [plan_seconds(plan, spec, precision) for plan in plans]
    return max(added_seconds([plans[i] for i in share], spec, precision) for share in balanced_shares(costs, world))


def model(layers: Sequence[Layer], spec: DeviceSpec, precision: Precision) -> Modelled:
    precision = spec.native_precision(precision)
    reference = sum(layer.count * reference_seconds(layer, spec, precision) for layer in layers)
    return Modelled(reference, *fused_seconds(layers, spec, precision))


def network_table(precision: Precision) -> str:
    lines = [
        f"Modelled, not measured: loss and gradient of all layers in one call, matrix products in {precision}.",
        "",
        "| network | device | reference, modelled ms | fused, modelled ms | modelled ratio | launches |",
        "|---|---|---|---|---|---|",
    ]
    for name, layers in NETWORKS.items():
        for device in DEVICES:
            result = model(layers, SPECS[device], precision)
            lines.append(
                f"| {name} | {device} | {result.reference * 1e3:.2f} | {result.fused * 1e3:.3f} | {result.ratio:.0f}x "
                f"| {result.launches} |"
            )
    return "\n".join(lines)


def regularised() -> list[Layer]:
    """The paper's setting: all 3x3 and 1x1 convolutions of ResNet-34, every lag, one loss per training step."""
    return [layer for layer in NETWORKS["resnet34"] if layer.shape[-1] in (1, 3)]


def step_seconds(spec: DeviceSpec, precision: Precision) -> float:
    """A training step of ResNet-34."""
    return 3 * RESNET34_FORWARD * BATCH / (spec.matmul[spec.native_precision(precision)] * TRAINING_EFFICIENCY)


def overhead_table(precision: Precision) -> str:
    layers = regularised()
    lines = [
        f"Modelled, not measured: ResNet-34, batch {BATCH}, 224x224, matrix products in {precision}.",
        "",
        "| device | training step, modelled ms | reference adds | `reg()` adds | `add_grad_` adds | staged "
        f"| on {WORLD} ranks |",
        "|---|---|---|---|---|---|---|",
    ]
    for device in DEVICES:
        spec = SPECS[device]
        native = spec.native_precision(precision)
        step, result = step_seconds(spec, precision), model(layers, spec, precision)
        plans = plans_of(layers, spec, native)
        times = (
            added_seconds(plans, spec, native),
            added_seconds(plans, spec, native, staged=True),
            sharded_seconds(plans, spec, native, WORLD),
        )
        added = " | ".join(f"{time / step:.2%} ({time * 1e3:.3f} ms)" for time in times)
        lines.append(
            f"| {device} | {step * 1e3:.0f} | {result.reference / step:.1%} ({result.reference * 1e3:.2f} ms) "
            f"| {result.fused / step:.2%} ({result.fused * 1e3:.3f} ms) | {added} |"
        )
    return "\n".join(lines)


def stage_table(precision: Precision) -> str:
    """Where the time of ``add_grad_`` goes: a stage takes as long as the largest of its columns, pass by pass."""
    needed = ("products", "instructions", "memory", "cache")
    lines = [
        f"Modelled, not measured: microseconds of `add_grad_` for ResNet-34, matrix products in {precision}.",
        "",
        "| device | stage | " + " | ".join(needed) + " | takes |",
        "|---|---|" + "---|" * (len(needed) + 1),
    ]
    for device in DEVICES[:3]:
        spec = SPECS[device]
        how = Launches.of(plans_of(regularised(), spec, precision), spec, precision)
        every = how.work(spec, precision, accumulate=True)
        for stage in STAGES:
            own = [(needs, took) for name, needs, took in every if name == stage]
            sums = [sum(needs[key] for needs, _ in own) for key in needed]
            figures = " | ".join(f"{time * 1e6:.0f}" for time in (*sums, sum(took for _, took in own)))
            lines.append(f"| {device} | {stage} | {figures} |")
        between = f"{how.count} launch, {how.barriers} barriers" if how.single else f"{how.count} launches"
        lines.append(f"| {device} | {between} | - | - | - | - | {how.seconds(spec) * 1e6:.0f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("ieee", "tf32x3", "tf32", "bf16"), default="tf32")
    options = parser.parse_args(arguments)
    tables = (overhead_table, stage_table, network_table)
    print("\n\n".join(table(options.precision) for table in tables))


if __name__ == "__main__":
    main()
