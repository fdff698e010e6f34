"""The Triton backend: all weights of a call in one launch, or in at most five, on NVIDIA and AMD GPUs.

Importable without triton, which is an extra of the package: :func:`unavailable_reason` says what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...plan import Plan
from .. import pytorch
from .availability import interpreted, unavailable_reason
from .config import LARGE_TILES, Config, check_launch, choose_config, resolve_precision, single_config
from .model import GPU_RATES, choose_plan, prefer_single, spec_of

__all__ = [
    "ONLY_ON_REQUEST",
    "OPTIONS",
    "RATES",
    "Config",
    "interpreted",
    "run",
    "unavailable_reason",
]

RATES = GPU_RATES

#: On a CPU only the interpreter runs, which nobody wants by default.
ONLY_ON_REQUEST = ("cpu",)

#: Further arguments of :func:`run` that the public functions pass on.
OPTIONS = ("precision", "launch")


@torch.no_grad()
def run(
    weights: Sequence[Tensor],
    plans: Sequence[Plan],
    with_grad: Sequence[bool],
    *,
    precision: str | None = None,
    launch: str = "auto",
    config: Config | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """One 0-dim loss per weight and one gradient per weight, empty where ``with_grad`` says False.

    Of each plan and its alternatives the one with the least modelled time on the device is run. ``precision`` is that
    of the products: None follows ``torch.get_float32_matmul_precision()``. float64 weights are computed by the plain
    PyTorch executor of the same plan: float64 products belong to the vendor's library, not to tensor-core tiles.
    """
    check_launch(launch)
    asked_precision = resolve_precision(precision)
    if any(weight.dtype == torch.float64 for weight in weights):
        return _run_with_float64(weights, plans, with_grad, precision=precision, launch=launch, config=config)
    from .cooperative import is_possible, resident_programs
    from .launch import Call

    spec = spec_of(weights[0].device)
    precision = spec.native_precision(asked_precision)
    plans = [choose_plan(plan, spec, precision, weight.dtype) for weight, plan in zip(weights, plans, strict=True)]
    if launch == "single" or (launch == "auto" and is_possible() and prefer_single(plans, spec, precision)):
        call = Call(weights, plans, with_grad, precision, config or single_config(spec.shipped[precision]))
        programs = resident_programs(call)
        if programs is None and launch == "single":
            raise RuntimeError(
                "launch='single' needs cooperative launches with a provable grid, which this device lacks"
            )
    else:
        programs = None
    if programs is None:
        call = Call(weights, plans, with_grad, precision, config or config_for(plans, precision, weights[0].device))
    call.run(programs)
    return call.loss_of_each(), call.grads()


def config_for(plans: Sequence[Plan], precision: str, device: torch.device) -> Config:
    """What :func:`ocnn_fused.tune` found for this device and these layers, else by :func:`.config.choose_config`."""
    from ...tune import tuned_config

    spec = spec_of(device)
    tiles = sum(plan.outputs * plan.groups * (-(-plan.work_rows // LARGE_TILES.block)) ** 2 for plan in plans)
    return tuned_config(device, precision, plans) or choose_config(spec.shipped[precision], tiles, spec.multiprocessors)


def _run_with_float64(
    weights: Sequence[Tensor], plans: Sequence[Plan], with_grad: Sequence[bool], **options: object
) -> tuple[list[Tensor], list[Tensor]]:
    """float64 weights by PyTorch, the others here; results in the order of the weights."""
    losses, grads = list(weights), list(weights)
    for double in (True, False):
        chosen = [index for index, weight in enumerate(weights) if (weight.dtype == torch.float64) == double]
        if not chosen:
            continue
        some = [weights[index] for index in chosen], [plans[index] for index in chosen]
        of_some = [with_grad[index] for index in chosen]
        if double:
            some_losses, some_grads = pytorch.run(*some, of_some)
        else:
            some_losses, some_grads = run(*some, of_some, **options)  # type: ignore[arg-type]
        for position, index in enumerate(chosen):
            losses[index], grads[index] = some_losses[position], some_grads[position]
    return losses, grads
