"""Autograd of ``ocnn_fused::orth_loss``: the gradient is computed together with the loss; backward only scales it.

Double backward is supported: when a graph of the backward is asked for (``create_graph=True``), the gradient is
recomputed through the differentiable reference formula, which autograd can differentiate again, to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .ops import _library


class OrthLoss(torch.autograd.Function):
    """``losses = orth_loss(weights)``; saves the weights and their gradients."""

    @staticmethod
    def forward(ctx: Any, geometry: tuple[Any, ...], *weights: Tensor) -> Tensor:  # type: ignore[override]
        losses, grads = torch.ops.ocnn_fused.orth_loss_and_grad(weights, *geometry)
        ctx.geometry = geometry
        ctx.save_for_backward(*weights, *grads)
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        count = len(ctx.saved_tensors) // 2
        weights, grads = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            grads = _differentiable_grads(weights, *ctx.geometry[:4])
        scales = grad_losses.unbind()
        return None, *(
            grad * scale.to(grad.dtype) if needed else None
            for grad, scale, needed in zip(grads, scales, ctx.needs_input_grad[1:], strict=True)
        )


def _differentiable_grads(
    weights: Sequence[Tensor],
    strides: Sequence[int],
    dilations: Sequence[int],
    paddings: Sequence[int],
    groups: Sequence[int],
) -> list[Tensor]:
    grads = []
    begin = 0
    for weight, group in zip(weights, groups, strict=True):
        axes = slice(begin, begin + weight.dim() - 2)
        begin = axes.stop
        # -1 keeps every lag; a padding of the whole kernel's extent does the same.
        padding = [
            p if p >= 0 else s * d * k
            for p, s, d, k in zip(paddings[axes], strides[axes], dilations[axes], weight.shape[2:], strict=True)
        ]
        with torch.autocast(weight.device.type, enabled=False):
            exact = weight if weight.dtype == torch.float64 else weight.float()
            loss = reference.orth_loss(exact, strides[axes], dilation=dilations[axes], groups=group, padding=padding)
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True) if weight.requires_grad else (weight,)
        grads.append(grad)
    return grads


def _orth_loss(weights: Sequence[Tensor], *geometry: Any) -> Tensor:
    # With nothing to differentiate, only the loss is computed.
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        return OrthLoss.apply(geometry, *weights)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.ocnn_fused.orth_loss(weights, *geometry)


_library.impl("orth_loss", _orth_loss, "Autograd")
