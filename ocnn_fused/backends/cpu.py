"""The compiled CPU backend (csrc/cpu): vectorised stages, and products of its own where they beat ATen's BLAS."""

from __future__ import annotations

import torch

from .. import _extension
from ..plan import Plan
from ..problem import Precision
from .lowering import compile_call

# What two AVX2 cores do per second; only ratios matter for choosing a plan, and they are much the same on more cores.
_MATMUL = 75e9  # multiply-adds inside matrix products of good size
_MATMUL_SIDE = 20.0  # side at which a product reaches half of that rate
_ELEMENTWISE = 25e9  # multiply-adds of the evaluate, mix and gather stages
BANDWIDTH = 12e9  # bytes
_LAUNCH = 4e-6  # seconds to issue one stage or one run of products
_LANE_PRODUCTS = 4e9  # multiply-adds of the small-group kernel, all lanes busy
_LANES = 16  # groups that kernel handles at once

prepare = compile_call


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves CPU tensors, not {device.type}"
    return _extension.unavailable_reason


def resolve_precision(precision: Precision | None, device: torch.device, linear: bool) -> Precision:
    """A CPU has no TF32: products are those of the accumulation dtype, whatever is asked for."""
    return "ieee"


def refusal(plan: Plan, dtype: torch.dtype, device: torch.device, precision: Precision) -> str | None:
    """Never: every plan runs."""
    return None


def seconds(plan: Plan, dtype: torch.dtype, device: torch.device, precision: Precision) -> float:
    """Estimated time of loss and gradient, for comparing plans: products, elementwise stages, traffic and launches."""
    work = plan.work
    if plan.small:  # three multiply-adds per product, idle lanes paid for
        busy = plan.groups / (-(-plan.groups // _LANES) * _LANES)
        return work.multiply_adds / (busy * _LANE_PRODUCTS) + _LAUNCH
    total = work.elementwise / _ELEMENTWISE + work.bytes / BANDWIDTH + _LAUNCH * (3 + 3 * len(plan.runs))
    side = plan.work_rows
    for product in plan.products:
        length = plan.contraction(product)
        multiply_adds = plan.groups * side * side * length * (2 if plan.self_paired[product.out] else 3)
        total += product_seconds(multiply_adds, side, length)
    return total


def product_seconds(multiply_adds: int, side: int, length: int) -> float:
    """Of products with these sides; one is slow when any of its sides is short."""
    return multiply_adds * (1 + _MATMUL_SIDE / side) * (1 + _MATMUL_SIDE / length) / _MATMUL
