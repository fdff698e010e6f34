"""The compiled CPU backend (csrc/cpu): vectorised stages, and products of its own where they beat ATen's BLAS."""

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
