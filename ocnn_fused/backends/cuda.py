"""The compiled CUDA backend (csrc/cuda): matrix products by torch's cuBLAS, kernels for the rest.

It runs where Triton does not, and needs no Python between its launches. Products follow PyTorch's own settings
(``torch.set_float32_matmul_precision``); half weights are read as they are and computed in float32.
"""

from __future__ import annotations

import re
from math import prod

import torch

from .. import _extension
from ..plan import Plan
from ..problem import Precision
from .compiled import prepare
from .device import Device, matmul_precision, missing_gpu, spec_of
from .job import accumulation_dtype, is_bilinear
from .lowering import batches
from .model import plan_seconds
from .rounding import is_accurate

__all__ = ["prepare", "refusal", "resolve_precision", "seconds", "takes", "unavailable_reason"]

takes = is_bilinear

#: Shared memory of a thread block, kSharedBytes in csrc/cuda/kernels.cuh, and what sums of the loss take of it.
_SHARED_BYTES = 48 << 10
_MIX_SUMS = 128 * 8
_SMALL_SUMS = 256 * 8


def unavailable_reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it serves CUDA devices, not {device.type}"
    if _extension.unavailable_reason is not None:
        return _extension.unavailable_reason
    if torch.version.hip is not None:
        return "it is compiled for NVIDIA GPUs, and this torch is built for ROCm"
    if not _extension.module.has_cuda:
        return (
            "the compiled extension was built without CUDA; with a CUDA toolkit, `OCNN_FUSED_CUDA=1 pip install .` "
            "builds it or says what is missing"
        )
    return missing_gpu() or _architecture_reason(device)


def _architecture_reason(device: torch.device) -> str | None:
    architectures = (_extension.build_info or {}).get("architectures", [])
    capability = torch.cuda.get_device_capability(device)
    if not architectures or any(_runs_on(architecture, capability) for architecture in architectures):
        return None
    major, minor = capability
    return (
        f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and the compiled extension is built for "
        f"{' '.join(architectures)}; rebuild it with TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Machine code (sm_86) runs on later GPUs of the same generation, PTX (compute_86) on all later ones.

    What has a letter behind (sm_90a) runs on nothing else.
    """
    kind, number, letter = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", architecture).groups()  # type: ignore[union-attr]
    own = divmod(int(number), 10)
    if letter:
        return own == capability
    return own <= capability and (kind == "compute" or own[0] == capability[0])


def fits(plan: Plan, dtype: torch.dtype) -> bool:
    """Whether a plan's mix, or a small group, fits into shared memory; see mix_tile and small_shape in kernels.cuh."""
    item = accumulation_dtype(dtype).itemsize
    if plan.small:
        elements = plan.rows * plan.channels * prod(axis.taps for axis in plan.axes) + len(plan.lags) * plan.rows**2
        return _SMALL_SUMS + elements * item <= _SHARED_BYTES
    smallest_tile = 2 * 3
    return plan.is_diagonal or _MIX_SUMS + 2 * (plan.outputs + len(plan.lags)) * smallest_tile * item <= _SHARED_BYTES


def launches(plan: Plan) -> int:
    """Kernels and products issued one after another for a loss with its gradient."""
    if plan.small:
        return 2
    runs = batches(plan).runs
    # Next to sums over neighbouring planes, other products of the row side go one by one.
    one_by_one = plan.side == "row" and any(run.summed for run in runs)
    products = sum(
        (run.count if one_by_one and not run.summed else 1) * (2 if run.left == run.right else 3) for run in runs
    )
    return products + (2 if plan.is_flat else 4)


def refusal(plan: Plan, dtype: torch.dtype, device: Device, precision: Precision) -> str | None:
    """Why a plan is never chosen for weights of ``dtype``, or None; a direct plan always serves."""
    if not fits(plan, dtype):
        return "does not fit into shared memory"
    return None if is_accurate(plan, precision, dtype) else f"not accurate enough in {precision}"


def seconds(plan: Plan, dtype: torch.dtype, device: Device, precision: Precision) -> float:
    """Modelled time of one layer, loss and gradient, with launches, which layers do not share."""
    spec = spec_of(device)
    return plan_seconds(plan, spec, precision) + spec.launch * launches(plan)


def resolve_precision(precision: Precision | None, device: Device, linear: bool) -> Precision:
    """How cuBLAS computes float32 products, those of convolutions too; the one asked for can only confirm it."""
    return spec_of(device).native_precision(_products_precision(precision))


def _products_precision(precision: Precision | None) -> Precision:
    setting = matmul_precision()
    current: Precision = "ieee" if setting == "highest" else "tf32"
    if precision not in (None, "ieee", "tf32"):
        raise ValueError(f"precision must be None, 'ieee' or 'tf32' for backend 'cuda', got {precision!r}")
    if precision not in (None, current):
        raise ValueError(
            f"precision must be None or {current!r} for backend 'cuda', whose products follow PyTorch's setting "
            f"{setting!r}, got {precision!r}; torch.set_float32_matmul_precision("
            f"{'highest' if precision == 'ieee' else 'high'!r}) changes it"
        )
    return current
