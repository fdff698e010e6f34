"""The Triton backend: all weights of a call in one launch, or in at most five, on NVIDIA and AMD GPUs.

Importable without triton, which is an extra of the package: :func:`unavailable_reason` says what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from ...plan import Plan
from ...problem import Launch, Options, Precision
from .. import pytorch
from ..device import Device, asked_precision, spec_of
from ..job import Epilogue, Executable, Job, is_bilinear, joined
from ..model import PASS_MEGABYTES, product_work, seconds_in_list
from ..rounding import is_accurate
from .availability import unavailable_reason
from .config import LARGE_TILES, MIX_SIZES, Config, choose_config, prefer_single, shipped, single_config
from .tuned import tuned_config

__all__ = [
    "prepare",
    "refusal",
    "resolve_precision",
    "run",
    "seconds",
    "takes",
    "unavailable_reason",
]

takes = is_bilinear


def resolve_precision(precision: Precision | None, device: Device, linear: bool) -> Precision:
    """What the device makes of the precision asked for, or of torch's setting for such a layer."""
    return spec_of(device).native_precision(precision or asked_precision(device, linear))


def refusal(plan: Plan, dtype: torch.dtype, device: Device, precision: Precision) -> str | None:
    """Why a plan is never chosen for weights of ``dtype``, or None; a direct plan always serves."""
    if dtype == torch.float64:  # PyTorch runs any plan, and rounds nothing
        return None
    if not plan.is_diagonal and plan.outputs > MIX_SIZES[-1]:
        return f"{plan.outputs} outputs, at most {MIX_SIZES[-1]} can be mixed"
    return None if is_accurate(plan, precision, dtype) else f"not accurate enough in {precision}"


def seconds(plan: Plan, dtype: torch.dtype, device: Device, precision: Precision) -> float:
    """Modelled time of one layer, loss and gradient; launches are shared by all layers of a call, and left out."""
    return seconds_in_list(plan, spec_of(device), precision)


def prepare(jobs: Sequence[Job[Plan]], device: torch.device, options: Options) -> Executable:
    """One pass for each precision among the jobs, or several where the workspace would grow too large.

    float64 weights go to the plain PyTorch executor of the same plans: their products belong to the vendor's library,
    not to tensor-core tiles.
    """
    places: dict[Precision | None, list[int]] = {}
    for index, job in enumerate(jobs):
        places.setdefault(None if job.operand.dtype == torch.float64 else job.precision, []).append(index)
    parts: list[tuple[list[int], Executable]] = []
    for precision, indices in places.items():
        if precision is None:
            parts.append((indices, pytorch.prepare([jobs[index] for index in indices], device, options)))
            continue
        for piece in pieces([jobs[index] for index in indices], precision):
            of_piece = [indices[place] for place in piece]
            plans = [jobs[index].plan for index in of_piece]
            with_grad = [jobs[index].operand.with_grad for index in of_piece]
            launch = options.launch or "auto"
            parts.append((of_piece, partial(_execute, plans, with_grad, precision, launch)))
    return joined(parts)


def _execute(
    plans: Sequence[Plan],
    with_grad: Sequence[bool],
    precision: Precision,
    launch: Launch,
    weights: Sequence[Tensor],
    epilogue: Epilogue | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    return run(weights, plans, with_grad, precision=precision, launch=launch, epilogue=epilogue)


def pieces(jobs: Sequence[Job[Plan]], precision: Precision) -> list[list[int]]:
    """Places of neighbouring jobs whose workspaces together stay within the limit, or within the largest one's."""
    from .tables import workspace_of

    sizes = [workspace_of(job.plan, 2 if precision == "bf16" else 4, job.operand.with_grad) for job in jobs]
    return grouped(sizes)


def grouped(sizes: Sequence[int]) -> list[list[int]]:
    """Places of neighbours that together take no more than the workspace may, or than the largest alone."""
    limit = max(workspace_limit(), *sizes)
    found: list[list[int]] = [[]]
    used = 0
    for place, size in enumerate(sizes):
        if used + size > limit:
            found.append([])
            used = 0
        found[-1].append(place)
        used += size
    return found


def workspace_limit() -> int:
    """Bytes of workspace that a pass may take: ``OCNN_FUSED_WORKSPACE_MB``, unless one layer alone needs more."""
    text = os.environ.get("OCNN_FUSED_WORKSPACE_MB") or str(PASS_MEGABYTES)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not megabytes > 0:
        raise ValueError(f"OCNN_FUSED_WORKSPACE_MB must be a positive number, got {text!r}")
    return int(megabytes * 2**20)


@torch.no_grad()
def run(
    weights: Sequence[Tensor],
    plans: Sequence[Plan],
    with_grad: Sequence[bool],
    *,
    precision: Precision,
    launch: Launch = "auto",
    config: Config | None = None,
    epilogue: Epilogue | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """One 0-dim loss per weight and one gradient per weight, empty where ``with_grad`` says False; none is float64."""
    from .cooperative import is_possible, resident_programs
    from .launch import Call, can_add

    if epilogue is not None and (epilogue.per_target or not can_add(weights, epilogue.targets)):
        losses, grads = run(weights, plans, with_grad, precision=precision, launch=launch, config=config)
        return losses, [
            epilogue.settle(place, weight, grad, plan.groups) if wanted else grad
            for place, (weight, grad, plan, wanted) in enumerate(zip(weights, grads, plans, with_grad, strict=True))
        ]
    spec = spec_of(weights[0].device)
    programs = None
    if launch == "single" or (launch == "auto" and is_possible() and prefer_single(plans, spec, precision)):
        call = Call(weights, plans, with_grad, precision, config or single_config(shipped(spec)[precision]), epilogue)
        programs = resident_programs(call)
        if programs is None and launch == "single":
            raise RuntimeError(
                "launch='single' needs cooperative launches with a provable grid, which this device lacks"
            )
    if programs is None:
        config = config or config_for(plans, precision, weights[0].device)
        call = Call(weights, plans, with_grad, precision, config, epilogue)
    call.run(programs)
    if call.adds:
        torch.autograd.graph.increment_version([t for t in epilogue.targets if not t.is_inference()])  # type: ignore[union-attr]
        return call.loss_of_each(), []
    return call.loss_of_each(), call.grads()


def config_for(plans: Sequence[Plan], precision: Precision, device: torch.device) -> Config:
    """What :func:`ocnn_fused.tune` found for this device and these layers, else by :func:`.config.choose_config`."""
    spec = spec_of(device)
    configs = shipped(spec)[precision]
    tiles = _large_tiles(tuple(plans))
    padding = _wide_padding(tuple(plans), configs[-1]) if configs[-1].wide else 0.0
    return tuned_config(device, precision, plans) or choose_config(configs, tiles, spec.multiprocessors, padding)


@lru_cache(maxsize=64)
def _large_tiles(plans: tuple[Plan, ...]) -> int:
    """Work items that gram would have with large tiles."""
    return sum(plan.outputs * plan.groups * (-(-plan.work_rows // LARGE_TILES.tile)) ** 2 for plan in plans)


@lru_cache(maxsize=64)
def _wide_padding(plans: tuple[Plan, ...], config: Config) -> float:
    """Share of multiply-adds that wide tiles add to those of square ones."""
    square, wide = (
        sum(sum(product_work(plan, config.tile, config.depth, width)) for plan in plans if not plan.small)
        for width in (config.tile, config.wide)
    )
    return wide / square - 1 if square else 0.0
