"""The orthogonal update of a list of tensors, in few passes over all of them: as operators, as matrices, or by taps.

As operators: an odd cubic ``a X + b (Z * X)`` of a convolution, cut to the kernel's support, needs nothing but the
gradient of the orthogonality loss with a target that is as good as zero, ``dL/dX = 4 Z * X``. So one fused pass over all
layers with ``b/4 * dL/dX`` as its epilogue is one step of all of them, for every stride, dilation, groups and rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

import torch
from torch import Tensor

from ..autograd import add_grads_
from ..backends.job import Epilogue, accumulation_dtype
from ..plan import axes_of
from ..problem import Options, Problem
from .coefficients import Step

#: What the passes compare the diagonal of lag 0 with: as good as zero, which would stand for another target.
NO_TARGET = 2.0**-60


def add_gradients_(
    tensors: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, factor: float, targets: Sequence[Tensor]
) -> list[Tensor]:
    """Add ``factor * 4 Z * X`` of each tensor to its target, which may be the tensor; returns ``||Z||^2`` of each.

    All that this package asks of the fused pass.
    """
    ones = torch.ones(len(tensors), dtype=torch.float64, device=tensors[0].device)
    return add_grads_(tensors, problems, options, Epilogue(ones, factor, targets))


def operators_(
    tensors: Sequence[Tensor], problems: tuple[Problem, ...], options: Options, steps: Sequence[Step]
) -> float:
    """Move the singular values of convolutions towards 1, in place; returns what is left to multiply them by.

    Each group is scaled to as much as an orthogonal one has, and then the layer divided by the smaller of two bounds of
    its operator norm ``||A||``: ``||K|| sqrt(n)``, where ``n`` placements of the kernel touch an input pixel, and
    ``(lags * ||Z||^2)^(1/4)``, which the first pass finds. So the first step is taken when its pass is over.
    """
    rows = torch.tensor([problem.rows for problem in problems], dtype=torch.float64)
    del rows
    for tensor, problem in zip(tensors, problems, strict=True):
        grouped = tensor.view(problem.groups, -1)
        norms = torch.linalg.vector_norm(grouped, dim=1, keepdim=True)
        grouped.mul_(torch.where(norms == 0, 0.0, sqrt(problem.rows) / norms))
    grads = [torch.zeros_like(tensor) for tensor in tensors]
    squares = torch.stack(add_gradients_(tensors, problems, options, 0.25, grads)).double()
    lags = squares.new_tensor([prod(2 * axis.lags + 1 for axis in axes_of(problem)) for problem in problems])
    others = squares.new_tensor([sqrt(problem.rows * _overlaps(problem)) for problem in problems])
    scales = 1 / torch.minimum((lags * squares).pow(0.25), others)
    scales = torch.where(squares == 0, 0.0, scales)
    (a, b, _), *following = steps
    torch._foreach_mul_(list(tensors), list((a * scales).to(tensors[0].dtype).unbind()))
    torch._foreach_mul_(grads, list((b * scales**3).to(tensors[0].dtype).unbind()))
    torch._foreach_add_(list(tensors), grads)
    del grads
    left = 1.0  # the tensors' own share of a step is not multiplied in, so that a step only adds
    for a, b, _ in following:
        add_gradients_(tensors, problems, options, b / a * left**2 / 4, tensors)
        left *= a
    return left


def _overlaps(problem: Problem) -> int:
    """Placements of the kernel that touch one input pixel."""
    return prod(-(-axis.taps // axis.step) for axis in axes_of(problem))


def matrices_(tensors: Sequence[Tensor], steps: Sequence[Step]) -> None:
    """Move the singular values of matrices (..., m, n) towards 1, in place; each is first divided by its norm."""
    kinds: dict[tuple[tuple[int, ...], torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tuple(tensor.shape), tensor.dtype, tensor.device), []).append(tensor)
    for (shape, _, _), members in kinds.items():
        stacked = members[0] if len(members) == 1 else torch.stack(members)
        matrix = stacked if shape[-2] <= shape[-1] else stacked.mT
        norms = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
        matrix = _by_gram(matrix * torch.where(norms == 0, 0.0, 1 / norms), steps)
        matrix = matrix if shape[-2] <= shape[-1] else matrix.mT
        for member, result in zip(members, [matrix] if len(members) == 1 else matrix.unbind(), strict=True):
            member.copy_(result)


def _by_gram(matrix: Tensor, steps: Sequence[Step]) -> Tensor:
    """``Q matrix`` with a polynomial ``Q`` of the Gram matrix: all products but two are of the smaller side."""
    gram = matrix @ matrix.mT
    total: Tensor | None = None
    for number, (a, b, c) in enumerate(steps):
        factor = b * gram if c == 0 else b * gram + c * (gram @ gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        total = factor if total is None else factor @ total
        if number + 1 < len(steps):
            gram = factor @ gram @ factor
    return matrix if total is None else total @ matrix


def accumulated(tensor: Tensor) -> torch.dtype:
    """What an update of a tensor is computed in."""
    return accumulation_dtype(tensor.dtype)
