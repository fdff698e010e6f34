"""The compiled CPU backend (csrc/cpu): products of large layers by ATen's BLAS, everything else vectorised."""

from __future__ import annotations

import torch

from .. import _extension
from ..plan import CPU_RATES
from .lowering import run_buckets

RATES = CPU_RATES


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves CPU tensors, not {device.type}"
    return _extension.unavailable_reason


run = run_buckets
