"""The compiled CPU backend: matrix products by ATen's BLAS, the other stages vectorised (csrc/cpu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _extension
from ..plan import CPU_RATES, Plan
from .lowering import run_buckets

RATES = CPU_RATES


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves CPU tensors, not {device.type}"
    return _extension.unavailable_reason


def run(weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: bool) -> tuple[list[Tensor], list[Tensor]]:
    return run_buckets(weights, plans, with_grad)
