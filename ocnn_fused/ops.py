"""The ops that ``torch.compile`` sees: geometry in, one 0-dim loss per weight out; planning stays inside.

``ocnn_fused::orth_loss`` is differentiable (see autograd.py); ``ocnn_fused::orth_loss_and_grad`` also returns the
gradients of the weights marked in ``with_grad`` (empty tensors for the others) and is what its forward calls when a
weight needs one. Both take, flattened over weights and their spatial axes, ``strides``, ``dilations`` and ``paddings``
(-1 for "all lags"), and one ``groups`` per weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _extension, backends
from .backends.lowering import Kind, accumulation_dtype, buckets, kinds_of
from .plan import Plan, Rates, make_plan, reduce_axis

_GEOMETRY = "int[] strides, int[] dilations, int[] paddings, int[] groups, str side, str backend"

# Tables that a first call leaves on the device would lie in the private memory of torch.compile's own CUDA graphs, so
# these leave the ops out; graphs that the user captures are not affected. Older torch has no such tag.
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []

_library = torch.library.Library("ocnn_fused", "FRAGMENT")
_library.define(f"orth_loss(Tensor[] weights, {_GEOMETRY}) -> Tensor[]", tags=_TAGS)
_library.define(
    f"orth_loss_and_grad(Tensor[] weights, {_GEOMETRY}, bool[] with_grad) -> (Tensor[], Tensor[])", tags=_TAGS
)


def plan_for(
    shape: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    paddings: Sequence[int],
    groups: int,
    side: str,
    backend: ModuleType,
) -> Plan:
    """The plan of one weight; ``paddings`` of -1 keep every lag."""
    return _cached_plan(tuple(shape), tuple(strides), tuple(dilations), tuple(paddings), groups, side, backend.RATES)


@lru_cache(maxsize=4096)
def _cached_plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    paddings: tuple[int, ...],
    groups: int,
    side: Any,
    rates: Rates,
) -> Plan:
    axes = tuple(
        reduce_axis(kernel, stride, dilation, None if padding < 0 else padding)
        for kernel, stride, dilation, padding in zip(shape[2:], strides, dilations, paddings, strict=True)
    )
    return make_plan(shape[0] // groups, shape[1], axes, groups, side, rates)


def plans_for(
    shapes: Sequence[Sequence[int]],
    strides: Sequence[int],
    dilations: Sequence[int],
    paddings: Sequence[int],
    groups: Sequence[int],
    side: str,
    backend: ModuleType,
) -> list[Plan]:
    """The plans of all weights, whose axes lie one after the other."""
    plans = []
    begin = 0
    for shape, group in zip(shapes, groups, strict=True):
        axes = slice(begin, begin + len(shape) - 2)
        begin = axes.stop
        plans.append(plan_for(shape, strides[axes], dilations[axes], paddings[axes], group, side, backend))
    return plans


@lru_cache(maxsize=1024)
def prepared(
    kinds: tuple[Kind, ...],
    device: torch.device,
    default_backend: str | None,
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    paddings: tuple[int, ...],
    groups: tuple[int, ...],
    side: str,
    backend: str,
) -> Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]:
    """Chooses a backend and plans, once for all calls that are alike. What is left is a function of the weights.

    It returns one loss per weight and one gradient, empty where none is wanted, all of them without a graph.
    """
    name, options = backends.decode(backend)
    module = backends.choose(device, name or default_backend)
    plans = tuple(plans_for([shape for shape, *_ in kinds], strides, dilations, paddings, groups, side, module))
    if module is backends.cpu:  # where nothing else can change from call to call
        return buckets(plans, kinds, device)
    with_grad = [wanted for *_, wanted in kinds]
    return partial(module.run, plans=plans, with_grad=with_grad, **backends.accepted(module, options))


def run(weights: Sequence[Tensor], *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """One loss per weight, and one gradient, empty where none is wanted; takes what ``orth_loss_and_grad`` takes."""
    *geometry, with_grad = (tuple(one) if isinstance(one, list) else one for one in arguments)
    return prepared(kinds_of(weights, with_grad), weights[0].device, backends.default_name(), *geometry)(weights)


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """Each with a storage of its own, as the outputs of an op must be: a backend may return pieces of one buffer."""
    return [from_dlpack(to_dlpack(one)) if one.untyped_storage().nbytes() > one.nbytes else one for one in tensors]


def _orth_loss(weights: Sequence[Tensor], *geometry: Any) -> list[Tensor]:
    arguments = (*geometry, [False] * len(weights))
    return _apart(run(weights, *arguments)[0])


def _orth_loss_and_grad(weights: Sequence[Tensor], *geometry: Any) -> tuple[list[Tensor], list[Tensor]]:
    losses, grads = run(weights, *geometry)
    return _apart(losses), _apart(grads)


_library.impl("orth_loss", _orth_loss, "CompositeExplicitAutograd")
_library.impl("orth_loss_and_grad", _orth_loss_and_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("ocnn_fused::orth_loss", lib=_library)
def _orth_loss_fake(weights: Sequence[Tensor], *geometry: Any) -> list[Tensor]:
    return [weight.new_empty((), dtype=accumulation_dtype(weight.dtype)) for weight in weights]


@torch.library.register_fake("ocnn_fused::orth_loss_and_grad", lib=_library)
def _orth_loss_and_grad_fake(weights: Sequence[Tensor], *geometry: Any) -> tuple[list[Tensor], list[Tensor]]:
    with_grad = geometry[-1]
    return _orth_loss_fake(weights), [
        torch.empty_like(weight) if needed else weight.new_empty(0)
        for weight, needed in zip(weights, with_grad, strict=True)
    ]


# Under autocast the loss stays in float32, as PyTorch's own losses do.
for _device_type in ("cpu", "cuda"):
    torch.library.register_autocast("ocnn_fused::orth_loss", _device_type, torch.float32, lib=_library)

if _extension.module is not None:
    for _op in ("execute_plan", "execute_small"):

        @torch.library.register_fake(f"ocnn_fused::{_op}", lib=_library)
        def _execute_fake(weights: Sequence[Tensor], *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
            with_grad = bool(arguments[-1])
            return _orth_loss_fake(weights), [torch.empty_like(weight) for weight in weights if with_grad]
