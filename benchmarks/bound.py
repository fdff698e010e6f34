"""The bound: the matrix products of a layer's plan and nothing else, at the speed of the BLAS.

No evaluation, no mixing, no gathering: what is left is the least time in which the plan can be executed with this BLAS.
The share of the bound a backend reaches says how much its other stages cost, on any machine. A backend with products of
its own, as the CPU backend has for most layers, can beat it where the BLAS is not at its best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from shapes import Layer
from steps import Settings
from torch import Tensor

from ocnn_fused.backends import BACKENDS, choose
from ocnn_fused.backends.lowering import batches
from ocnn_fused.backends.triton.config import resolve_precision
from ocnn_fused.backends.triton.model import choose_plan, spec_of
from ocnn_fused.ops import plan_for
from ocnn_fused.plan import Plan, Run

Product = tuple[Tensor, Tensor, Tensor]  # left, right, out


def plan_of(layer: Layer, settings: Settings) -> Plan:
    """The plan that the fused call chooses for this layer."""
    axes, device = len(layer.shape) - 2, torch.device(settings.device)
    every_lag, backend = [-1] * axes, choose(device)
    plan = plan_for(
        layer.shape, [layer.stride] * axes, [layer.dilation] * axes, every_lag, layer.groups, "auto", backend
    )
    if backend is BACKENDS["triton"]:  # which chooses again, when it knows the device
        spec = spec_of(device)
        plan = choose_plan(plan, spec, spec.native_precision(resolve_precision(None)))
    return plan


def _run_products(plan: Plan, run: Run, gradient: bool, make: Callable[..., Tensor]) -> list[Product]:
    """The batched products of one run: ``X = V V'^T``, then ``G = Y V'`` and, unless V is V', ``G' = Y^T V``.

    A summed run is one product with a long contraction, and its gradient one with a long output.
    """
    side = plan.work_rows
    contraction = plan.rows if plan.side == "column" else plan.channels * batches(plan).pools[run.block].residues
    batch = plan.groups * (1 if run.summed else run.count)
    length = contraction * (run.count if run.summed else 1)
    left = make(batch, side, length)
    right = left if run.left == run.right else make(batch, side, length)
    products = [(left, right.mT, make(batch, side, side))]
    if gradient:
        adjoint = make(batch, side, side)
        products.append((adjoint, right, torch.empty_like(left)))
        if right is not left:
            products.append((adjoint.mT, left, torch.empty_like(right)))
    return products


def products_of(layers: Sequence[Layer], settings: Settings) -> list[Product]:
    """Every batched product of the layers' plans, with operands of its own; repeated layers share theirs.

    Empty where no layer is computed by matrix products (small groups).
    """
    dtype = torch.promote_types(settings.dtype, torch.float32)  # half types accumulate in float32

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=settings.device)

    products: list[Product] = []
    for layer in layers:
        plan = plan_of(layer, settings)
        runs = () if plan.small else batches(plan).runs
        own = [product for run in runs for product in _run_products(plan, run, settings.gradient, make)]
        products += own * layer.count
    return products


def run_products(products: Sequence[Product]) -> None:
    """One pass over the products."""
    for left, right, out in products:
        torch.bmm(left, right, out=out)
