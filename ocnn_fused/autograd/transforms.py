"""Derivatives of the ops, for ``torch.func``, forward mode, double backward and ``torch.compile``, and their ``vmap``.

All that the package needs of torch's private names for this is here. First derivatives are the gradient: ``scale *
grad`` backwards, ``<grad, tangent>`` forwards. ``orth_grad`` turns that gradient into a function of the weights whose
derivative is the Hessian of the reference formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from .. import engine, ops, reference
from ..backends.job import Executable, Operand, accumulation_dtype, losses_dtype
from ..problem import (
    Flat,
    FlatProblems,
    Options,
    Problem,
    flatten_problems,
    repeated,
    repeated_problems,
    unflatten,
    unflatten_problems,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

#: What a Function is at one level: without what torch.autograd.Function does in Python for transforms.
SingleLevelFunction = _SingleLevelFunction


def prepared(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, always_grad: bool = False
) -> tuple[Executable | None, tuple[Operand, ...]]:
    """What computes these weights, with gradients of those that require them, or of all.

    None where the ops must be seen: by a subclass, mode, tracer, transform or forward differentiation. (Autocast need
    not see them, because losses are computed in float32 at least.) The dispatcher's way through Python costs as much as
    a small layer; tensors that only autograd looks at go without it.
    """
    if torch.compiler.is_dynamo_compiling():
        return None, ()
    enabled = torch.is_grad_enabled()
    operands = []
    for weight in weights:
        if type(weight) not in PLAIN_TYPES or weight.is_neg():
            return None, ()
        with_grad = always_grad or (enabled and weight.requires_grad)
        # As tuples are made: a NamedTuple's own constructor is a Python function.
        operands.append(tuple.__new__(Operand, (weight.stride(), weight.dtype, with_grad)))
    device = weight.device
    if (
        device.type not in ("cpu", "cuda")
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _is_tracing()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return None, ()
    resolved: Options | engine.Resolved = options
    if device.type != "cpu" or options.backend is not None:
        resolved = engine.resolve(options, device)
    found = tuple(operands)
    return engine.prepare(problems, found, resolved, device), found


def is_batched(scale: Tensor) -> bool:
    """Whether ``vmap`` runs this backward (``is_grads_batched``), with several scales in one."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(scale) or functorch.is_legacy_batchedtensor(scale)


def graph_is_kept() -> bool:
    """Whether the backward that runs may be followed by another through the same graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_known_to_be_one(scale: Tensor) -> bool:
    """Whether a scale is one, as it is where the loss itself is differentiated; looked up only where nothing waits."""
    return scale.is_cpu and type(scale) is Tensor and not _len_torch_dispatch_stack() and scale.item() == 1


# Each Function is the derivative at one level: the ops in its forward pass lead to the next one.


@contextmanager
def _next_level() -> Iterator[None]:
    """Below this level's autograd. PyTorch forbids a Function to record, but further levels have to."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class _LossContext(FunctionCtx):
    problems: tuple[Problem, ...]
    with_grad: Sequence[bool]
    grads: Sequence[Tensor]  # not a part of the graph: hooks do not see them
    saved_tensors: tuple[Tensor, ...]


class _OrthLoss(SingleLevelFunction):
    """``losses, *grads = orth_loss_and_grad(weights)``; the gradients count as constants."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _LossContext, with_grad: Sequence[bool], flat: Flat, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        with _next_level():
            losses, grads = ops.orth_loss_and_grad(weights, with_grad, *flat)
        ctx.problems, ctx.with_grad, ctx.grads = unflatten(weights, *flat)[0], with_grad, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        ctx.mark_non_differentiable(*grads)
        return losses, *grads

    @staticmethod
    def backward(ctx: _LossContext, scale: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, grads = ctx.saved_tensors, ctx.grads  # raises if the weights have changed, or the graph is freed
        if scale is None:
            return None, None, *(None for _ in weights)
        if torch.is_grad_enabled():  # a graph of this very backward is wanted
            grads = ops.orth_grad(weights, grads, *flatten_problems(ctx.problems))
        # The scales are 0-dim, so they do not promote the gradients' dtype.
        scaled = (
            grad * one if wanted else None
            for grad, one, wanted in zip(grads, scale.unbind(), ctx.with_grad, strict=True)
        )
        return None, None, *scaled

    @staticmethod
    def jvp(ctx: _LossContext, _with_grad: None, _flat: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype = losses_dtype([grad.dtype for grad in ctx.grads])
        along = [
            grad.new_zeros((), dtype=dtype) if tangent is None else torch.sum(grad * tangent, dtype=dtype)
            for grad, tangent in zip(ctx.grads, tangents, strict=True)
        ]
        return torch.stack(along), *(None for _ in ctx.grads)


class _GradContext(FunctionCtx):
    problems: tuple[Problem, ...]
    wanted: Sequence[bool]  # else there is no gradient
    saved_tensors: tuple[Tensor, ...]


class _OrthGrad(SingleLevelFunction):
    """Known gradients as functions of the weights; the Hessian is symmetric, so both directions are one formula."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _GradContext, problems: tuple[Problem, ...], *weights_and_grads: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(problems)
        weights, grads = weights_and_grads[:count], weights_and_grads[count:]
        ctx.problems, ctx.wanted = problems, [grad.numel() > 0 for grad in grads]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        ctx.save_for_forward(*weights)
        with _next_level():
            return tuple(ops.orth_grad(weights, grads, *flatten_problems(problems)))

    @staticmethod
    def backward(ctx: _GradContext, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        products = _hessian_products(ctx, vectors)
        return None, *products, *(None for _ in products)

    @staticmethod
    def jvp(ctx: _GradContext, _problems: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        products = _hessian_products(ctx, tangents[: len(ctx.problems)])
        return tuple(
            (torch.zeros_like(weight) if wanted else weight.new_zeros(0)) if product is None else product
            for weight, product, wanted in zip(ctx.saved_tensors, products, ctx.wanted, strict=True)
        )


def _hessian_products(ctx: _GradContext, vectors: Sequence[Tensor | None]) -> list[Tensor | None]:
    products: list[Tensor | None] = []
    for weight, vector, wanted, problem in zip(ctx.saved_tensors, vectors, ctx.wanted, ctx.problems, strict=True):
        if vector is None or not wanted:
            products.append(None)
            continue
        with torch.autocast(weight.device.type, enabled=False):
            dtype = accumulation_dtype(weight.dtype)
            product = reference.hessian_product(weight.to(dtype), vector.to(dtype), problem)
        products.append(product.to(weight.dtype))
    return products


def _by_reference(weights: Sequence[Tensor], problems: Sequence[Problem]) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients as ordinary PyTorch operations of the weights."""
    losses, grads = [], []
    dtype = losses_dtype([weight.dtype for weight in weights])
    for weight, problem in zip(weights, problems, strict=True):
        with torch.autocast(weight.device.type, enabled=False):
            exact = weight.to(accumulation_dtype(weight.dtype))
            losses.append(reference.loss_of(exact, problem).to(dtype))
            grads.append(reference.grad_of(exact, problem).to(weight.dtype))
    return torch.stack(losses), grads


def _differentiating_levels() -> list[TransformType]:
    """The levels of ``torch.func`` that differentiate, the innermost last."""
    if not torch._C._are_functorch_transforms_active():
        return []
    kinds = [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
    return [kind for kind in kinds if kind in (TransformType.Grad, TransformType.Jvp)]


def _in_forward_mode(weights: Sequence[Tensor]) -> bool:
    """Whether this level differentiates forwards."""
    if torch._C._are_functorch_transforms_active():
        return _differentiating_levels()[-1:] == [TransformType.Jvp]
    return forward_ad._current_level >= 0 and any(_has_tangent(weight) for weight in weights)


def _has_tangent(weight: Tensor) -> bool:
    return forward_ad.unpack_dual(weight).tangent is not None


def _forward_mode_is_nested(weights: Sequence[Tensor]) -> bool:
    """Whether a forward derivative is itself to be differentiated, which PyTorch loses in a Function's jvp."""
    if not _in_forward_mode(weights):
        return False
    return len(_differentiating_levels()) > 1 or any(weight.requires_grad for weight in weights)


def _differentiate_loss_and_grad(
    weights: Sequence[Tensor], with_grad: Sequence[bool], *flat: Unpack[Flat]
) -> tuple[Tensor, list[Tensor]]:
    if _forward_mode_is_nested(weights):
        return _by_reference(weights, unflatten(weights, *flat)[0])
    with enable_single_level_autograd_function():
        losses, *grads = _OrthLoss.apply(with_grad, flat, *weights)  # type: ignore[attr-defined]
    return losses, grads


def _differentiate_loss(weights: Sequence[Tensor], *flat: Unpack[Flat]) -> Tensor:
    """With nothing to differentiate, only the loss is computed."""
    forward = _in_forward_mode(weights)
    with_grad = [forward or (torch.is_grad_enabled() and weight.requires_grad) for weight in weights]
    if any(with_grad):
        return _differentiate_loss_and_grad(weights, with_grad, *flat)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return ops.orth_loss(weights, *flat)


def _differentiate_grad(
    weights: Sequence[Tensor], grads: Sequence[Tensor], *flat: Unpack[FlatProblems]
) -> list[Tensor]:
    problems = unflatten_problems(weights, *flat)
    if _forward_mode_is_nested(weights):
        return _by_reference(weights, problems)[1]
    with enable_single_level_autograd_function():
        return list(_OrthGrad.apply(problems, *weights, *grads))  # type: ignore[attr-defined]


ops.library.impl("orth_loss", _differentiate_loss, "Autograd")
ops.library.impl("orth_loss_and_grad", _differentiate_loss_and_grad, "Autograd")
ops.library.impl("orth_grad", _differentiate_grad, "Autograd")


# ----------------------------------------------------------------------------------------------------------------------
# vmap: a batch of weights is a longer list of weights
# ----------------------------------------------------------------------------------------------------------------------

_Dims = Sequence["int | None"]
_Batched = tuple[list[Tensor], list[int]]


def _unbatched(info: VmapInfo, dims: _Dims, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of the first of the batch, then those of the second, and so on."""
    batches = [
        tensor.unbind(dim) if dim is not None else (tensor,) * info.batch_size
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return [tensor for each in zip(*batches, strict=True) for tensor in each]


def _batched(info: VmapInfo, results: Sequence[Tensor]) -> _Batched:
    count = len(results) // info.batch_size
    return [torch.stack(list(results[index::count])) for index in range(count)], [0] * count


@torch.library.register_vmap("ocnn_fused::orth_loss", lib=ops.library)
def _(info: VmapInfo, in_dims: tuple[_Dims, ...], weights: Sequence[Tensor], *flat: Unpack[Flat]) -> tuple[Tensor, int]:
    many = _unbatched(info, in_dims[0], weights)
    return ops.orth_loss(many, *repeated(info.batch_size, *flat)).view(info.batch_size, len(weights)), 0


@torch.library.register_vmap("ocnn_fused::orth_loss_and_grad", lib=ops.library)
def _(
    info: VmapInfo, in_dims: tuple[_Dims, ...], weights: Sequence[Tensor], wanted: Sequence[bool], *flat: Unpack[Flat]
) -> tuple[tuple[Tensor, list[Tensor]], tuple[int, list[int]]]:
    many, flat = _unbatched(info, in_dims[0], weights), repeated(info.batch_size, *flat)
    losses, grads = ops.orth_loss_and_grad(many, list(wanted) * info.batch_size, *flat)
    batched, dims = _batched(info, grads)
    return (losses.view(info.batch_size, len(weights)), batched), (0, dims)


@torch.library.register_vmap("ocnn_fused::orth_grad", lib=ops.library)
def _(
    info: VmapInfo,
    in_dims: tuple[_Dims, ...],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    *flat: Unpack[FlatProblems],
) -> _Batched:
    many = (_unbatched(info, dims, tensors) for dims, tensors in zip(in_dims, (weights, grads), strict=False))
    return _batched(info, ops.orth_grad(*many, *repeated_problems(info.batch_size, *flat)))
