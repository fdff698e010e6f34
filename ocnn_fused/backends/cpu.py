"""The compiled CPU backend: matrix products by ATen's BLAS, the other stages vectorised (csrc/cpu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _extension
from ..plan import CPU_RATES, Plan
from .lowering import accumulation_dtype, lower, lower_small

RATES = CPU_RATES


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves CPU tensors, not {device.type}"
    return _extension.unavailable_reason


def run(weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    ops = torch.ops.ocnn_fused
    losses, grads = [], []
    for weight, plan in zip(weights, plans, strict=True):
        if plan.small:
            loss, grad = ops.execute_small.default(weight, *lower_small(plan), with_grad)
        else:
            lowered = lower(plan, accumulation_dtype(weight.dtype))
            loss, grad = ops.execute_plan.default(weight, *lowered, with_grad)
        losses.append(loss)
        grads.append(grad)
    return losses, grads if with_grad else []
