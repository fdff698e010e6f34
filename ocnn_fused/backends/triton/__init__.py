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
from ..device import Device, DeviceSpec, asked_precision, spec_of
from ..epilogue import Epilogue, apply_epilogue
from ..job import Executable, Job, LossesAndGrads, is_bilinear, joined
from ..model import PASS_MEGABYTES, product_work, seconds_in_list
from ..rounding import is_accurate
from .availability import unavailable_reason
from .config import LARGE_TILES, MIX_SIZES, Config, choose_config, prefer_single, shipped, single_configs
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
    """One call for each precision among the jobs; it takes several passes where the workspace would grow too large.

    float64 weights go to the plain PyTorch executor of the same plans: their products belong to the vendor's library,
    not to tensor-core tiles.
    """
    from .tables import passes_of

    places: dict[Precision | None, list[int]] = {}
    for index, job in enumerate(jobs):
        places.setdefault(None if job.operand.dtype == torch.float64 else job.precision, []).append(index)
    parts: list[tuple[list[int], Executable]] = []
    alone = len(places.keys() - {None}) == 1
    for precision, indices in places.items():
        some = [jobs[index] for index in indices]
        if precision is None:
            parts.append((indices, pytorch.prepare(some, device, options)))
            continue
        plans, with_grad = [job.plan for job in some], [job.operand.with_grad for job in some]
        passes = passes_of(plans, with_grad, precision, workspace_limit())
        launch = options.launch or "auto"
        parts.append((indices, partial(_execute, plans, with_grad, precision, launch, passes, alone)))
    return joined(parts, device)


def _execute(
    plans: Sequence[Plan],
    with_grad: Sequence[bool],
    precision: Precision,
    launch: Launch,
    passes: tuple[range, ...],
    alone: bool,
    weights: Sequence[Tensor],
    epilogue: Epilogue | None = None,
) -> LossesAndGrads:
    return run(
        weights, plans, with_grad, precision=precision, launch=launch, epilogue=epilogue, passes=passes, alone=alone
    )


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
    passes: tuple[range, ...] | None = None,
    alone: bool = True,
) -> LossesAndGrads:
    """The losses, 1-D, and one gradient per weight, empty where ``with_grad`` says False; no weight is float64.

    ``passes`` are the places of the weights that share the workspace, all of them by default. ``alone``: no weights of
    another precision are in the list, for which there would be another call.
    """
    from .cooperative import is_possible, resident_programs
    from .launch import Call, can_add

    if epilogue is not None and (epilogue.per_target or not can_add(weights, epilogue.targets)):
        losses, grads = run(
            weights, plans, with_grad, precision=precision, launch=launch, config=config, passes=passes, alone=alone
        )
        return losses, [
            apply_epilogue(epilogue, place, weight, grad, plan.groups) if wanted else grad
            for place, (weight, grad, plan, wanted) in enumerate(zip(weights, grads, plans, with_grad, strict=True))
        ]
    device, count = weights[0].device, len(passes or (plans,))
    programs = None
    if launch == "single" or (
        launch == "auto" and is_possible() and prefer_single(plans, spec_of(device), precision, count, alone)
    ):
        of_one = config or config_for(plans, precision, device, count, single=True)
        call = Call(weights, plans, with_grad, precision, of_one, epilogue, passes)
        programs = resident_programs(call)
        if programs is None and launch == "single":
            raise RuntimeError(
                "launch='single' needs triton 3.5 or newer, and cooperative launches with a provable grid, "
                "which AMD's devices lack"
            )
    if programs is None:
        of_each = config or config_for(plans, precision, device, count)
        call = Call(weights, plans, with_grad, precision, of_each, epilogue, passes)
    call.run(programs)
    if call.adds:
        torch.autograd.graph.increment_version([t for t in epilogue.targets if not t.is_inference()])  # type: ignore[union-attr]
        return call.losses, []
    return call.losses, call.grads()


def config_for(
    plans: Sequence[Plan], precision: Precision, device: torch.device, passes: int = 1, single: bool = False
) -> Config:
    """By :func:`.config.choose_config`; launches of single stages as :func:`ocnn_fused.tune` found them, if it did."""
    tuned = None if single else tuned_config(device, precision, plans)
    return tuned or _config(tuple(plans), precision, spec_of(device), passes, single)


@lru_cache(maxsize=64)
def _config(plans: tuple[Plan, ...], precision: Precision, spec: DeviceSpec, passes: int, single: bool) -> Config:
    configs = shipped(spec)[precision]
    padding = _wide_padding(plans, configs[-1]) if configs[-1].wide else 0.0
    every = single_configs(configs) if single else configs
    return choose_config(every, _large_tiles(plans) // passes, spec.multiprocessors, padding)


def _large_tiles(plans: tuple[Plan, ...]) -> int:
    """Work items that gram would have with large tiles."""
    return sum(plan.outputs * plan.groups * (-(-plan.work_rows // LARGE_TILES.tile)) ** 2 for plan in plans)


def _wide_padding(plans: tuple[Plan, ...], config: Config) -> float:
    """Share of multiply-adds that wide tiles add to those of square ones."""
    square, wide = (
        sum(sum(product_work(plan, config.tile, config.depth, width)) for plan in plans if not plan.small)
        for width in (config.tile, config.wide)
    )
    return wide / square - 1 if square else 0.0
