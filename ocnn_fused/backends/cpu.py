"""The compiled CPU backend (csrc/cpu): vectorised stages and matrix products."""

from __future__ import annotations

from math import prod

import torch

from .. import _extension
from ..plan import AnyPlan, FourierPlan
from ..problem import Precision
from .compiled import prepare
from .job import accumulation_dtype
from .lowering import fourier_constants

# What two AVX2 cores do per second; only ratios matter for choosing a plan, and they are much the same on more cores.
_MATMUL = 75e9  # multiply-adds inside matrix products of good size
_MATMUL_SIDE = 20.0  # side at which a product reaches half of that rate
_ELEMENTWISE = 25e9  # multiply-adds of the evaluate, mix and gather stages
BANDWIDTH = 12e9  # bytes
_LAUNCH = 4e-6  # seconds to issue one stage or one run of products
_LANE_PRODUCTS = 4e9  # multiply-adds of the small-group kernel, all lanes busy
_LANES = 16  # groups that kernel handles at once

#: Bytes of a Fourier plan's matrices: above, an FFT is both smaller and faster.
_MOST_FOURIER_BYTES = 4 << 20
# Rates of compiled Fourier plans that compare with those above as measured times do.
_FOURIER_PRODUCTS = 16e9  # real multiply-adds of complex products of good size
_FOURIER_SIDE = 8.0  # side at which such a product reaches half of that rate
_FOURIER_TRANSFORM = 4e9  # multiply-adds of transforms
_FOURIER_GROUP = 0.4e-6  # seconds for each group

__all__ = ["prepare", "refusal", "resolve_precision", "seconds", "takes", "unavailable_reason"]


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves CPU tensors, not {device.type}"
    return _extension.unavailable_reason


def resolve_precision(precision: Precision | None, device: torch.device, linear: bool) -> Precision:
    """A CPU has no TF32: products are those of the accumulation dtype, whatever is asked for."""
    return "ieee"


def takes(plan: AnyPlan, dtype: torch.dtype) -> bool:
    """Every plan, but Fourier plans that form lags, or have axes too long to be transformed by a matrix."""
    if not isinstance(plan, FourierPlan):
        return True
    fits = fourier_constants(plan) * accumulation_dtype(dtype).itemsize <= _MOST_FOURIER_BYTES
    return fits and plan.keeps_all_lags


def refusal(plan: AnyPlan, dtype: torch.dtype, device: torch.device, precision: Precision) -> str | None:
    """Never: every plan runs."""
    return None


def seconds(plan: AnyPlan, dtype: torch.dtype, device: torch.device, precision: Precision) -> float:
    """Estimated time of loss and gradient, for comparing plans: products, elementwise stages, traffic and launches."""
    if isinstance(plan, FourierPlan):
        return _fourier_seconds(plan)
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


def _fourier_seconds(plan: FourierPlan) -> float:
    """Of a compiled plan: six real products for a complex one and its gradient, and transforms axis by axis."""
    *others, last = sorted(plan.class_taps)
    elements = plan.groups * plan.rows * plan.channels * plan.phases
    frequencies = prod(2 * taps - 1 for taps in others) * last
    # Lanes are frequencies, in whole vectors, and a single group is shared out by vectors.
    at_once = 2 * _LANES if plan.groups == 1 else _LANES
    products = 6 * -(-frequencies // at_once) * at_once * elements * plan.work_rows / _FOURIER_PRODUCTS
    products *= (1 + _FOURIER_SIDE / plan.work_rows) * (1 + _FOURIER_SIDE / plan.contraction)
    rows, lanes = prod(others), last
    transform = rows * last * lanes
    for taps in reversed(others):
        rows //= taps
        transform += rows * 2 * taps * taps * lanes
        lanes *= 2 * taps - 1
    transforms = 2 * elements * transform / _FOURIER_TRANSFORM
    return products + transforms + _FOURIER_GROUP * plan.groups + 2 * _LAUNCH


def product_seconds(multiply_adds: int, side: int, length: int) -> float:
    """Of products with these sides; one is slow when any of its sides is short."""
    return multiply_adds * (1 + _MATMUL_SIDE / side) * (1 + _MATMUL_SIDE / length) / _MATMUL
