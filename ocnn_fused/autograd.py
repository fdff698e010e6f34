"""How the losses are differentiated: the gradient is computed together with the loss, and its derivative only if asked.

Every way to differentiate comes here: the ops have a derivative for autograd, for each level of ``torch.func`` and for
``torch.compile``, which trace them, and a rule for ``vmap``. Plain tensors, that nobody but autograd looks at, skip the
dispatcher; where they are computed by compiled code, csrc/autograd.cpp makes the node.

First derivatives are the gradient: ``scale * grad`` backwards, ``<grad, tangent>`` forwards. ``orth_grad`` turns that
gradient into a function of the weights whose derivative is the Hessian of the reference formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import VmapInfo
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx, _SingleLevelFunction

from . import _extension, engine, ops, reference
from .backends.job import Epilogue, Executable, Operand, accumulation_dtype
from .problem import (
    Flat,
    FlatProblems,
    Options,
    Problem,
    flatten,
    flatten_problems,
    repeated,
    repeated_problems,
    unflatten,
    unflatten_problems,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_COMPILED_CALL: type | tuple[()] = () if _extension.module is None else _extension.module.Call

_orth_loss = torch.ops.ocnn_fused.orth_loss.default
_orth_loss_and_grad = torch.ops.ocnn_fused.orth_loss_and_grad.default
_orth_grad = torch.ops.ocnn_fused.orth_grad.default


def orth_losses(weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options) -> Sequence[Tensor]:
    """One 0-dim loss per weight, differentiable where a weight is."""
    executable = _prepared(weights, problems, options)
    if executable is None:
        return _orth_loss(weights, *flatten(problems, options))
    if isinstance(executable, _COMPILED_CALL):
        return executable.attached(weights)  # type: ignore[no-any-return, attr-defined]
    with_grad = _wanted(weights)
    if any(with_grad):
        return OrthLoss.apply(problems, options, with_grad, *weights)[: len(weights)]  # type: ignore[attr-defined]
    return executable(weights)[0]


class Coefficients(NamedTuple):
    """What the losses of some weights are multiplied by, and what they are counted from; all where the weights are."""

    values: Tensor  # in the dtype of the sum
    factors: Tensor  # the same, in float64; nobody may write into it afterwards, for backward may read it
    least: Tensor | None  # in the dtype of the sum


def orth_total(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    coefficients: Coefficients,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """``factor * sum_l coefficient_l * (L_l - least_l)``, differentiable, and the losses without a graph, 1-D.

    One node of autograd's graph for all weights, whose gradients have the factors in them already. Where somebody else
    looks too it is what it says, as PyTorch's own operations on the losses.
    """
    executable = _prepared(weights, problems, options)
    if executable is None:
        losses = torch.stack(list(_orth_loss(weights, *flatten(problems, options))))
        counted = losses if coefficients.least is None else losses - coefficients.least
        value = torch.dot(counted.double(), coefficients.factors) * factor
        return value.to(losses.dtype), losses.detach()
    if isinstance(executable, _COMPILED_CALL):
        least = None if coefficients.least is None else coefficients.least.double()
        return executable.total(weights, coefficients.factors, factor, least)  # type: ignore[no-any-return, attr-defined]
    with_grad = _wanted(weights)
    if any(with_grad):
        return OrthTotal.apply(executable, problems, coefficients, factor, with_grad, *weights)  # type: ignore[attr-defined, no-any-return]
    losses = torch.stack(executable(weights)[0])
    return _weighted(losses, coefficients) * factor, losses


def add_grads_(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, epilogue: Epilogue
) -> list[Tensor]:
    """Add ``factor * factors[l]`` times the gradient of each loss to its target; returns the losses, no graph."""
    executable = _prepared(weights, problems, options, always_grad=True)
    if executable is not None:
        return executable(weights, epilogue)[0]
    losses, grads = _orth_loss_and_grad(weights, [True] * len(weights), *flatten(problems, options))
    for place, (grad, target) in enumerate(zip(grads, epilogue.targets, strict=True)):
        target.add_(grad * (epilogue.factors[place] * epilogue.factor))
    return losses


def _weighted(losses: Tensor, coefficients: Coefficients) -> Tensor:
    return torch.dot(losses if coefficients.least is None else losses - coefficients.least, coefficients.values)


def _prepared(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, always_grad: bool = False
) -> Executable | None:
    """What computes these weights, and gradients of those that require them, or of all.

    None where a subclass, mode, tracer, transform, forward differentiation or autocast wants to see the ops. The
    dispatcher's way through Python costs as much as a small layer; plain tensors go without it.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    for weight in weights:
        if type(weight) not in PLAIN_TYPES:
            return None
    device = weights[0].device
    if (
        device.type not in ("cpu", "cuda")
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled(device.type)
    ):
        return None
    needs_grad = torch.is_grad_enabled()
    operands = []
    for weight in weights:
        with_grad = always_grad or (needs_grad and weight.requires_grad)
        operands.append(Operand(weight.stride(), weight.dtype, with_grad))
    resolved: Options | engine.Resolved = options
    if device.type != "cpu" or options.backend is not None:
        resolved = engine.resolve(options, device)
    return engine.prepare(problems, tuple(operands), resolved, device)


def _wanted(weights: Sequence[Tensor]) -> list[bool]:
    """Of which weights the gradient is."""
    enabled = torch.is_grad_enabled()
    return [enabled and weight.requires_grad for weight in weights]


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives of the ops
# ----------------------------------------------------------------------------------------------------------------------

# Each Function is the derivative at one level: the ops in its forward pass lead to the next one.


@contextmanager
def _next_level() -> Iterator[None]:
    """Below this level's autograd. PyTorch forbids a Function to record, but further levels have to."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class _LossContext(FunctionCtx):
    problems: tuple[Problem, ...]
    with_grad: Sequence[bool]
    grads: Sequence[Tensor]  # our own memory, not a part of the graph: hooks do not see it
    saved_tensors: tuple[Tensor, ...]


class OrthLoss(_SingleLevelFunction):
    """``*losses, *grads = orth_loss_and_grad(weights)``; the gradients count as constants."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _LossContext,
        problems: tuple[Problem, ...],
        options: Options,
        with_grad: Sequence[bool],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        with _next_level():
            losses, grads = _orth_loss_and_grad(weights, with_grad, *flatten(problems, options))
        ctx.problems, ctx.with_grad, ctx.grads = problems, with_grad, grads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        ctx.mark_non_differentiable(*grads)
        return *losses, *grads

    @staticmethod
    def backward(ctx: _LossContext, *scales: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, grads = ctx.saved_tensors, ctx.grads  # raises if the weights have changed, or the graph is freed
        if torch.is_grad_enabled():  # a graph of this very backward is wanted
            grads = _orth_grad(weights, grads, *flatten_problems(ctx.problems))
        # The scales are 0-dim, so they do not promote the gradients' dtype.
        return (
            *(None, None, None),
            *(
                None if scale is None or not wanted else grad * scale
                for grad, scale, wanted in zip(grads, scales, ctx.with_grad, strict=False)
            ),
        )

    @staticmethod
    def jvp(
        ctx: _LossContext, _problems: None, _options: None, _with_grad: None, *tangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # An output that is differentiable must get a tangent, if only zero.
        along = [
            grad.new_zeros((), dtype=accumulation_dtype(grad.dtype))
            if tangent is None
            else torch.sum(grad * tangent, dtype=accumulation_dtype(grad.dtype))
            for grad, tangent in zip(ctx.grads, tangents, strict=True)
        ]
        return *along, *(None for _ in ctx.grads)


class _TotalContext(FunctionCtx):
    problems: tuple[Problem, ...]
    with_grad: Sequence[bool]
    factors: Tensor  # by which the gradients are multiplied, together with factor
    factor: float
    grads: Sequence[Tensor] | None  # until nobody asks again
    saved_tensors: tuple[Tensor, ...]


class OrthTotal(_SingleLevelFunction):
    """The sum of losses times coefficients, of plain tensors; the losses count as constants. See csrc/autograd.cpp."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: _TotalContext,
        executable: Executable,
        problems: tuple[Problem, ...],
        coefficients: Coefficients,
        factor: float,
        with_grad: Sequence[bool],
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        losses, ctx.grads = executable(weights, Epilogue(coefficients.factors, factor))
        ctx.problems, ctx.with_grad = problems, with_grad
        ctx.factors, ctx.factor = coefficients.factors, factor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        stacked = torch.stack(losses)
        ctx.mark_non_differentiable(stacked)
        return _weighted(stacked, coefficients).mul_(factor), stacked

    @staticmethod
    def backward(ctx: _TotalContext, scale: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weights, grads = ctx.saved_tensors, ctx.grads  # raises if the weights have changed, or the graph is freed
        results: list[Tensor | None] = [None] * len(weights)
        if scale is None or grads is None:
            return *(None,) * 5, *results
        places = [place for place, wanted in enumerate(ctx.with_grad) if wanted]
        if torch.is_grad_enabled():  # a graph of this very backward: without the factors they are functions of weights
            numbers = (ctx.factors * ctx.factor).unbind()
            plain = [grad / number if grad.numel() else grad for grad, number in zip(grads, numbers, strict=True)]
            plain = _orth_grad(weights, plain, *flatten_problems(ctx.problems))
            for place in places:
                results[place] = plain[place] * (scale * numbers[place])
            return *(None,) * 5, *results
        wanted = [grads[place] for place in places]
        if torch._C._are_functorch_transforms_active():  # is_grads_batched
            scaled: Sequence[Tensor] = [grad * scale for grad in wanted]
        elif torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = torch._foreach_mul(wanted, scale)
        else:  # nobody asks again
            ctx.grads = None
            torch._foreach_mul_(wanted, scale)
            scaled = wanted
        taken = _add_at_the_end([weights[place] for place in places], scaled)
        for place, grad, is_taken in zip(places, scaled, taken, strict=True):
            results[place] = None if is_taken else grad
        return *(None,) * 5, *results


def _add_at_the_end(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[bool]:
    """See csrc/autograd.h; for which of them."""
    if _extension.module is None or torch._C._are_functorch_transforms_active():
        return [False] * len(weights)
    return _extension.module.add_at_the_end(weights, grads)  # type: ignore[no-any-return]


class _GradContext(FunctionCtx):
    problems: tuple[Problem, ...]
    wanted: Sequence[bool]  # else there is no gradient
    saved_tensors: tuple[Tensor, ...]


class OrthGrad(_SingleLevelFunction):
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
            return tuple(_orth_grad(weights, grads, *flatten_problems(problems)))

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


def _by_reference(weights: Sequence[Tensor], problems: Sequence[Problem]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients as ordinary PyTorch operations of the weights."""
    losses, grads = [], []
    for weight, problem in zip(weights, problems, strict=True):
        with torch.autocast(weight.device.type, enabled=False):
            exact = weight.to(accumulation_dtype(weight.dtype))
            losses.append(reference.loss_of(exact, problem))
            grads.append(reference.grad_of(exact, problem).to(weight.dtype))
    return losses, grads


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
) -> tuple[list[Tensor], list[Tensor]]:
    problems, options = unflatten(weights, *flat)
    if _forward_mode_is_nested(weights):
        return _by_reference(weights, problems)
    with enable_single_level_autograd_function():
        outputs = OrthLoss.apply(problems, options, with_grad, *weights)  # type: ignore[attr-defined]
    return list(outputs[: len(weights)]), list(outputs[len(weights) :])


def _differentiate_loss(weights: Sequence[Tensor], *flat: Unpack[Flat]) -> list[Tensor]:
    """With nothing to differentiate, only the loss is computed."""
    forward = _in_forward_mode(weights)
    with_grad = [forward or (torch.is_grad_enabled() and weight.requires_grad) for weight in weights]
    if any(with_grad):
        return _differentiate_loss_and_grad(weights, with_grad, *flat)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return _orth_loss(weights, *flat)


def _differentiate_grad(
    weights: Sequence[Tensor], grads: Sequence[Tensor], *flat: Unpack[FlatProblems]
) -> list[Tensor]:
    problems = unflatten_problems(weights, *flat)
    if _forward_mode_is_nested(weights):
        return _by_reference(weights, problems)[1]
    with enable_single_level_autograd_function():
        return list(OrthGrad.apply(problems, *weights, *grads))  # type: ignore[attr-defined]


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
def _(info: VmapInfo, in_dims: tuple[_Dims, ...], weights: Sequence[Tensor], *flat: Unpack[Flat]) -> _Batched:
    many = _unbatched(info, in_dims[0], weights)
    return _batched(info, _orth_loss(many, *repeated(info.batch_size, *flat)))


@torch.library.register_vmap("ocnn_fused::orth_loss_and_grad", lib=ops.library)
def _(
    info: VmapInfo, in_dims: tuple[_Dims, ...], weights: Sequence[Tensor], wanted: Sequence[bool], *flat: Unpack[Flat]
) -> tuple[tuple[list[Tensor], ...], tuple[list[int], ...]]:
    many, flat = _unbatched(info, in_dims[0], weights), repeated(info.batch_size, *flat)
    results = _orth_loss_and_grad(many, list(wanted) * info.batch_size, *flat)
    lists, dims = zip(*(_batched(info, result) for result in results), strict=True)
    return lists, dims


@torch.library.register_vmap("ocnn_fused::orth_grad", lib=ops.library)
def _(
    info: VmapInfo,
    in_dims: tuple[_Dims, ...],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    *flat: Unpack[FlatProblems],
) -> _Batched:
    many = (_unbatched(info, dims, tensors) for dims, tensors in zip(in_dims, (weights, grads), strict=False))
    return _batched(info, _orth_grad(*many, *repeated_problems(info.batch_size, *flat)))
