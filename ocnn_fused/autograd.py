"""Autograd of ``ocnn_fused::orth_loss``: the gradient is computed together with the loss; backward only scales it.

Double backward is supported: when a graph of the backward is asked for (``create_graph=True``), the gradient is
recomputed through the differentiable reference formula, which autograd can differentiate again, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from . import _extension, reference
from .backends import default_name
from .backends.lowering import Kind, kinds_of
from .ops import _library, prepared, run

#: Whether the running backward keeps its graph (``retain_graph``); if PyTorch does not tell, assume that it does.
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _is_batched(scale: Tensor | None) -> bool:
    """Whether vmap runs this backward (``is_grads_batched``), with several scales in one."""
    functorch = torch._C._functorch
    return scale is not None and (functorch.is_batchedtensor(scale) or functorch.is_legacy_batchedtensor(scale))


def _remember(ctx: Any, geometry: tuple[Any, ...], weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """What backward needs. The gradients are our own memory, not a part of the graph: hooks do not see them."""
    ctx.geometry = geometry
    ctx.grads = grads
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*weights)


class OrthLoss(torch.autograd.Function):
    """``losses = orth_loss(weights)``; saves the weights and their gradients.

    ``geometry`` is what the op ``orth_loss_and_grad`` takes after the weights.
    """

    @staticmethod
    def forward(ctx: Any, geometry: tuple[Any, ...], *weights: Tensor) -> Any:  # type: ignore[override]
        losses, grads = losses_and_grads(weights, *geometry)
        _remember(ctx, geometry, weights, grads)
        return tuple(losses)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, grads = ctx.saved_tensors, ctx.grads
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul
        if torch.is_grad_enabled():
            grads = _differentiable_grads(weights, *ctx.geometry[:4])
        elif not _graph_is_kept() and not any(map(_is_batched, grad_outputs)):
            # Nobody asks again: scaling in place saves a copy of every gradient.
            multiply, ctx.grads = Tensor.mul_, None
        # The scales are 0-dim, so they do not promote the gradients' dtype.
        return None, *(
            multiply(grad, scale) if needed and scale is not None else None
            for grad, scale, needed in zip(grads, grad_outputs[: len(weights)], ctx.needs_input_grad[1:], strict=True)
        )


class TransformableOrthLoss(OrthLoss):
    """The same for ``torch.func`` transforms, which ask for a forward without context; PyTorch calls it more slowly."""

    @staticmethod
    def forward(geometry: tuple[Any, ...], *weights: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        losses, grads = torch.ops.ocnn_fused.orth_loss_and_grad.default(weights, *geometry)
        return *losses, *grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        geometry, *weights = inputs
        grads = output[len(weights) :]
        ctx.mark_non_differentiable(*grads)
        _remember(ctx, geometry, weights, grads)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], geometry: tuple[Any, ...], *weights: Tensor) -> Any:
        """A batch of weights is a longer list of weights."""
        size = info.batch_size
        batches = [
            weight.unbind(dim) if dim is not None else (weight,) * size
            for weight, dim in zip(weights, in_dims[1:], strict=True)
        ]
        repeated = (*(list(values) * size for values in geometry[:4]), *geometry[4:6], geometry[6] * size)
        outputs = TransformableOrthLoss.apply(
            repeated, *(weight for batch in zip(*batches, strict=True) for weight in batch)
        )
        count = len(weights)
        losses, grads = outputs[: size * count], outputs[size * count :]
        stacked = [torch.stack(of_all[index::count]) for of_all in (losses, grads) for index in range(count)]
        return tuple(stacked), (0,) * (2 * count)


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


if _extension.module is not None:
    _extension.module.set_differentiable_grads(_differentiable_grads)

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _are_plain(weights: Sequence[Tensor]) -> bool:
    """Whether nobody but autograd wants to see the ops: no subclass, mode, tracer or autocast.

    The dispatcher's way through Python costs as much as a small layer; plain tensors go without it.
    """
    for weight in weights:
        if type(weight) not in PLAIN_TYPES:
            return False
    device_type = weights[0].device.type
    return (
        device_type in ("cpu", "cuda")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._is_tracing()
        and not torch.is_autocast_enabled(device_type)
    )


def losses_and_grads(weights: Sequence[Tensor], *geometry: Any) -> tuple[list[Tensor], list[Tensor]]:
    """One 0-dim loss and one gradient per weight, without a graph; ``geometry`` ends with ``with_grad``."""
    compute = run if _are_plain(weights) else torch.ops.ocnn_fused.orth_loss_and_grad.default
    return compute(weights, *geometry)


def orth_losses(weights: Sequence[Tensor], *geometry: Any) -> Sequence[Tensor]:
    """One 0-dim loss per weight. ``torch.func`` transforms must see the Function itself, ``torch.compile`` one op."""
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return TransformableOrthLoss.apply((*geometry, [True] * len(weights)), *weights)[: len(weights)]
        if _are_plain(weights):
            return _plain_losses(weights, *geometry)
    return torch.ops.ocnn_fused.orth_loss.default(weights, *geometry)


def _plain_losses(weights: Sequence[Tensor], *geometry: Any) -> Sequence[Tensor]:
    """The same as the op; where there is compiled code, it does what :class:`OrthLoss` does, with less overhead."""
    if _extension.module is None:
        return _orth_loss(weights, *geometry)
    with_grad = [torch.is_grad_enabled() and weight.requires_grad for weight in weights]
    return _with_graph(kinds_of(weights, with_grad), weights[0].device, default_name(), *geometry)(weights)


@lru_cache(maxsize=1024)
def _with_graph(
    kinds: tuple[Kind, ...], device: torch.device, default_backend: str | None, *geometry: Any
) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """What :func:`prepared` returns, made a function that returns the losses alone, differentiable where wanted."""
    compute = prepared(kinds, device, default_backend, *geometry)
    if not any(wanted for *_, wanted in kinds):
        return lambda weights: compute(weights)[0]
    lists = _extension.module.Geometry(*geometry[:4])
    if isinstance(compute, _extension.module.Buckets):
        return partial(compute.attached, lists)
    return lambda weights: _extension.module.attach(weights, *compute(weights), lists)


def _orth_loss(weights: Sequence[Tensor], *geometry: Any) -> Sequence[Tensor]:
    # With nothing to differentiate, only the loss is computed.
    with_grad = [weight.requires_grad for weight in weights]
    if torch.is_grad_enabled() and any(with_grad):
        return list(OrthLoss.apply((*geometry, with_grad), *weights))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.ocnn_fused.orth_loss.default(weights, *geometry)


_library.impl("orth_loss", _orth_loss, "Autograd")
