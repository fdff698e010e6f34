"""The one node of autograd's graph: losses of a list of weights, or their weighted sum, on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import ops
from ..backends.epilogue import Epilogue
from ..backends.job import Executable, Operand
from ..problem import Options, Problem, flatten, flatten_problems
from . import transforms


class Weighting(NamedTuple):
    """What the losses of some weights are multiplied by, and the values that are subtracted from them first."""

    factors: Tensor  # float64, where the weights are
    least: Tensor | None = None  # float64

    def counted(self, losses: Tensor) -> Tensor:
        """``losses - least``, in float64."""
        wide = losses.double()
        return wide if self.least is None else wide - self.least

    def total(self, losses: Tensor, factor: float) -> Tensor:
        """``factor * sum_l factors[l] * (losses[l] - least[l])``, in the dtype of the losses."""
        return (torch.dot(self.counted(losses), self.factors) * factor).to(losses.dtype)


def orth_losses(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, shape: tuple[int, ...] = (-1,)
) -> Tensor:
    """One loss per weight, differentiable where a weight is; 1-D, or of shape ``()`` for one weight."""
    executable, operands = transforms.prepared(weights, problems, options)
    if executable is None:
        return ops.orth_loss(weights, *flatten(problems, options)).view(shape)
    for operand in operands:
        if operand.with_grad:
            return OrthNode.apply(executable, problems, operands, shape, None, 1.0, *weights)[0]  # type: ignore[attr-defined]
    return executable(weights)[0].view(shape)


def orth_total(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    weighting: Weighting,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """``factor * sum_l factors[l] * (L_l - least[l])``, differentiable, and the losses without a graph, 1-D.

    The gradients have the factors in them when they are computed; backward only hands them on, scaled.
    """
    executable, operands = transforms.prepared(weights, problems, options)
    if executable is None:
        losses = ops.orth_loss(weights, *flatten(problems, options))
        return weighting.total(losses, factor), losses.detach()
    if any(operand.with_grad for operand in operands):
        return OrthNode.apply(executable, problems, operands, (), weighting, factor, *weights)  # type: ignore[attr-defined]
    losses = executable(weights)[0]
    return weighting.total(losses, factor), losses


def add_grads_(
    weights: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, epilogue: Epilogue
) -> Tensor:
    """Add ``factor * factors[l]`` times the gradient of each loss to its target; returns the losses, no graph."""
    executable, _ = transforms.prepared(weights, problems, options, always_grad=True)
    if executable is not None:
        return executable(weights, epilogue)[0]
    losses, grads = ops.orth_loss_and_grad(weights, [True] * len(weights), *flatten(problems, options))
    for place, (grad, target) in enumerate(zip(grads, epilogue.targets, strict=True)):
        target.add_(grad * (epilogue.factors[place] * epilogue.factor))
    return losses


class NodeContext(FunctionCtx):
    """What the node keeps until its backward."""

    call: tuple[Executable, tuple[Problem, ...], tuple[Operand, ...], Weighting | None, float]
    grads: list[Tensor] | None  # not a part of the graph: hooks do not see them; None once they were handed on
    saved_tensors: tuple[Tensor, ...]


class OrthNode(transforms.SingleLevelFunction):  # no transform is active: ops.py serves these
    """``(losses,)``, or with a weighting ``(total, losses)``, of which only the total is differentiable."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: NodeContext,
        executable: Executable,
        problems: tuple[Problem, ...],
        operands: tuple[Operand, ...],
        shape: tuple[int, ...],
        weighting: Weighting | None,
        factor: float,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.call = executable, problems, operands, weighting, factor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        if weighting is None:
            losses, ctx.grads = executable(weights)
            return (losses.view(shape),)
        losses, ctx.grads = executable(weights, Epilogue(weighting.factors, factor))
        ctx.mark_non_differentiable(losses)
        return weighting.total(losses, factor), losses

    @staticmethod
    def backward(ctx: NodeContext, scale: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of each weight times ``scale``, which is one number for all, or one for each."""
        weights, grads = ctx.saved_tensors, ctx.grads  # raises if the weights have changed, or the graph is freed
        executable, problems, operands, weighting, factor = ctx.call
        if scale is None or grads is None:
            return (None,) * (_ARGUMENTS + len(weights))
        if torch.is_grad_enabled():  # a graph of this very backward is wanted
            if weighting is not None:  # without the factors, gradients are functions of the weights
                grads = executable(weights)[1]
                scale = scale * (weighting.factors * factor)
            grads = _scaled(ops.orth_grad(weights, grads, *flatten_problems(problems)), scale)
        elif transforms.graph_is_kept() or transforms.is_batched(scale):
            grads = _scaled(grads, scale)
        else:  # nobody asks again
            ctx.grads = None
            if scale.dim():
                torch._foreach_mul_(grads, list(scale.unbind()))
            elif not transforms.is_known_to_be_one(scale):
                torch._foreach_mul_(grads, scale)
        results: list[Tensor | None] = [None] * _ARGUMENTS
        for grad, operand in zip(grads, operands, strict=True):
            results.append(grad if operand.with_grad else None)
        return tuple(results)


#: Arguments of the node before the weights.
_ARGUMENTS = 6


def _scaled(grads: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    # The scales are 0-dim, so they do not promote the gradients' dtype.
    scales = scale.unbind() if scale.dim() else (scale,) * len(grads)
    return [grad * one for grad, one in zip(grads, scales, strict=True)]
