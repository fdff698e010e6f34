"""The orthogonality loss written as the paper writes it, with ``F.conv1d/2d/3d``.

Differentiable to any order, any floating dtype, any device: the baseline of every benchmark and the path that double
backward takes. Nothing here shares code with the plans.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import FREE, OFF_DIAGONAL, IntOrTuple, Part, Problem, Target, problem_of

__all__ = ["official_orth_loss", "orth_loss"]

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def frobenius_norm(squared: Tensor) -> Tensor:
    """Square root of sums of squares, with a gradient of zero (not NaN) where the sum is zero."""
    zero = squared == 0
    return torch.where(zero, torch.ones_like(squared), squared).sqrt().masked_fill(zero, 0.0)


def orth_loss(
    weight: Tensor,
    stride: IntOrTuple = 1,
    *,
    dilation: IntOrTuple = 1,
    groups: int = 1,
    padding: IntOrTuple | None = None,
    target: Target = 1,
    part: Part = "all",
    squared: bool = True,
) -> Tensor:
    """``||Conv(K, K, padding=P, stride=S) - a I_r0||_F^2`` of a weight ``(M, C/groups, k1..kn)``, as a 0-dim tensor.

    ``padding=None`` is the paper's ``floor((k-1)/S)*S`` (of the dilated extent), which keeps every lag at which two
    placements of the kernel overlap. Groups are independent and their losses add. ``squared=False`` returns the norm.
    ``a`` is the target; "free" takes the one that makes the loss least, ``||K||^2 / M`` of each group.
    ``part="off_diagonal"`` leaves out the diagonal of lag 0, where ``a`` is.

    A dilated kernel meets itself only at multiples of ``stride/gcd(stride, dilation)`` taps, so the convolution runs on
    the undilated taps with that stride.
    """
    loss = loss_of(weight, problem_of(weight.shape, stride, dilation, groups, padding, target, part))
    return loss if squared else frobenius_norm(loss)


def loss_of(weight: Tensor, problem: Problem) -> Tensor:
    """:func:`orth_loss` of a problem."""
    residual = _SelfConvolution(problem).residual(weight)
    return residual.square().sum(dtype=torch.promote_types(weight.dtype, torch.float32))


def grad_of(weight: Tensor, problem: Problem) -> Tensor:
    """Gradient of :func:`orth_loss`, ``4 sum_t (Z_t - [t=0] a I) K``, in the weight's shape, written with ``F.conv*``.

    Both gradients of the self-convolution are equal, so it is twice the one with respect to the input. A free ``a``
    counts as a constant: there the derivative with respect to it is zero.
    """
    convolution = _SelfConvolution(problem)
    return 4 * convolution.adjoint(convolution.residual(weight), weight)


def hessian_product(weight: Tensor, vector: Tensor, problem: Problem) -> Tensor:
    """The derivative of :func:`grad_of` in the direction ``vector``, which has the weight's shape."""
    convolution = _SelfConvolution(problem)
    change = convolution.residual_change(weight, vector)
    return 4 * (convolution.adjoint(change, weight) + convolution.adjoint(convolution.residual(weight), vector))


class _SelfConvolution:
    """``Conv(A, B, padding=P, stride=S)`` of kernels of one problem, and its adjoint."""

    def __init__(self, problem: Problem) -> None:
        self.groups, self.rows, self.channels = problem.groups, problem.rows, problem.channels
        self.target = problem.target
        self.kernel = problem.kernel or (1,)  # a Linear weight is a 1-tap convolution
        self.steps, self.pads = [1] * len(self.kernel), [0] * len(self.kernel)
        paddings = problem.padding or (None,) * len(problem.kernel)
        geometry = zip(problem.kernel, problem.stride, problem.dilation, paddings, strict=True)
        for axis, (k, s, d, p) in enumerate(geometry):
            step = s // gcd(s, d)
            lags = (k - 1) // step
            if p is not None:
                lags = min(lags, p // (step * d))
            # With lag 0 alone there is one position, and PyTorch is faster at stride 1.
            self.steps[axis], self.pads[axis] = step if lags else 1, lags * step

    def filters(self, kernels: Tensor) -> Tensor:
        """``(groups * rows, channels, k..)``, as they are."""
        return kernels.reshape(self.groups * self.rows, self.channels, *self.kernel)

    def inputs(self, kernels: Tensor) -> Tensor:
        """``(rows, groups * channels, k..)``: one grouped convolution then serves all groups."""
        grouped = kernels.reshape(self.groups, self.rows, self.channels, *self.kernel).transpose(0, 1)
        return grouped.reshape(self.rows, self.groups * self.channels, *self.kernel)

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        """``(rows, groups * rows, lags..)``."""
        convolution = _CONVOLUTIONS[len(self.kernel) - 1]
        return convolution(self.inputs(first), self.filters(second), None, self.steps, self.pads, 1, self.groups)  # type: ignore[arg-type]

    def residual(self, kernels: Tensor) -> Tensor:
        target = self.mean_of_rows(kernels.square()) if self.target == FREE else self.target
        return self.without_diagonal(self(kernels, kernels), target)

    def residual_change(self, kernels: Tensor, vector: Tensor) -> Tensor:
        """The derivative of :meth:`residual` in the direction ``vector``; a free target changes too."""
        target = self.mean_of_rows(2 * kernels * vector) if self.target == FREE else 0.0
        return self.without_diagonal(self(vector, kernels) + self(kernels, vector), target)

    def mean_of_rows(self, elements: Tensor) -> Tensor:
        """Sums over a group's rows, averaged; one for every row of all groups."""
        return (elements.reshape(self.groups, -1).sum(1) / self.rows).repeat_interleave(self.rows)

    def without_diagonal(self, product: Tensor, target: Tensor | float) -> Tensor:
        """Minus ``target`` on the diagonal of lag 0, or with zeros there."""
        identity = torch.eye(self.rows, dtype=product.dtype, device=product.device).repeat(1, self.groups)
        whole = self.target != OFF_DIAGONAL
        # Padded, not written into zeros: torch.func.linearize loses what is done in place.
        around = [p // s for p, s in zip(reversed(self.pads), reversed(self.steps), strict=True) for _ in range(2)]
        diagonal = F.pad((identity * target if whole else identity)[(..., *(None for _ in self.kernel))], around)
        return product - (diagonal if whole else product * diagonal)

    def adjoint(self, products: Tensor, second: Tensor) -> Tensor:
        """The transpose of ``self(., second)``, in the shape of ``second``."""
        transposed = _TRANSPOSED[len(self.kernel) - 1]
        inputs = transposed(products, self.filters(second), None, self.steps, self.pads, 0, self.groups)  # type: ignore[arg-type]
        grouped = inputs.reshape(self.rows, self.groups, self.channels, *self.kernel).transpose(0, 1)
        return grouped.reshape(second.shape)


def official_orth_loss(weight: Tensor, stride: int = 1, padding: int = 1) -> Tensor:
    """What the authors' published code computes for a Conv2d weight: ``torch.norm(Z - I)`` with a fixed padding of 1.

    Kept for comparison. It is the norm, not its square; it sees only the lags that a padding of 1 leaves; and for a 3x3
    kernel at stride 2 those are -1 and +1: lag 0 is never looked at and the identity is put on lag (+1, +1), so that
    an exactly orthogonal layer is penalised more than an all-zero one. Use :func:`orth_loss` to train.
    """
    product = F.conv2d(weight, weight, stride=stride, padding=padding)
    target = torch.zeros_like(product)
    middle = product.shape[-1] // 2
    target[:, :, middle, middle] = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return torch.linalg.vector_norm(product - target)
