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

from ocnn_fused import engine
from ocnn_fused.backends.lowering import batches
from ocnn_fused.plan import AnyPlan, FourierPlan, Plan, Run
from ocnn_fused.problem import DEFAULT_OPTIONS

Product = tuple[Tensor, Tensor, Tensor]  # left, right, out


def plan_of(layer: Layer, settings: Settings) -> AnyPlan:
    """The plan that the fused call chooses for this layer."""
    device = torch.device(settings.device)
    options = engine.resolve(DEFAULT_OPTIONS, device).of(layer.problem)
    return engine.choose(layer.problem, settings.dtype, device, options).plan


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


def _fourier_products(plan: FourierPlan, gradient: bool, make: Callable[..., Tensor]) -> list[Product]:
    """Two products of every frequency, and three for the gradient."""
    batch, side, length = plan.frequencies * plan.groups, plan.work_rows, plan.contraction
    left, right, residual = make(batch, side, length), make(batch, side, length), make(batch, side, side)
    products = [(left, right.mT, residual), (left, left.mT, residual)]
    return products + [(make(batch, side, side), left, right)] * (3 if gradient else 0)


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
        if isinstance(plan, FourierPlan):
            own = _fourier_products(plan, settings.gradient, make)
        else:
            runs = () if plan.small else batches(plan).runs
            own = [product for run in runs for product in _run_products(plan, run, settings.gradient, make)]
        products += own * layer.count
    return products


def run_products(products: Sequence[Product]) -> None:
    """One pass over the products."""
    for left, right, out in products:
        torch.bmm(left, right, out=out)
