"""The orthogonality loss written as the paper writes it, with ``F.conv1d/2d/3d``.

Differentiable to any order, any floating dtype, any device: the baseline of every benchmark and the path that double
backward takes. Nothing here shares code with the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["official_orth_loss", "orth_loss"]

_CONVOLUTIONS = (F.conv1d, F.conv1d, F.conv2d, F.conv3d)


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)


def frobenius_norm(squared: Tensor) -> Tensor:
    """Square root of sums of squares, with a gradient of zero (not NaN) where the sum is zero."""
    zero = squared == 0
    return torch.where(zero, torch.ones_like(squared), squared).sqrt().masked_fill(zero, 0.0)


def orth_loss(
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    *,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding: int | Sequence[int] | None = None,
    squared: bool = True,
) -> Tensor:
    """``||Conv(K, K, padding=P, stride=S) - I_r0||_F^2`` of a weight ``(M, C/groups, k1..kn)``, as a 0-dim tensor.

    ``padding=None`` is the paper's ``floor((k-1)/S)*S`` (of the dilated extent), which keeps every lag at which two
    placements of the kernel overlap. Groups are independent and their losses add. ``squared=False`` returns the norm.

    A dilated kernel meets itself only at multiples of ``stride/gcd(stride, dilation)`` taps, so the convolution runs on
    the undilated taps with that stride.
    """
    axes = weight.dim() - 2
    strides, dilations = _per_axis(stride, axes), _per_axis(dilation, axes)
    paddings = (None,) * axes if padding is None else _per_axis(padding, axes)
    kernel: tuple[int, ...] = weight.shape[2:]
    steps, pads = [], []
    for k, s, d, p in zip(kernel, strides, dilations, paddings, strict=True):
        step = s // gcd(s, d)
        lags = (k - 1) // step
        if p is not None:
            lags = min(lags, p // (step * d))
        steps.append(step if lags else 1)  # with lag 0 alone there is one position, and PyTorch is faster at stride 1
        pads.append(lags * step)
    if axes == 0:  # a Linear weight is a 1-tap convolution
        weight, kernel, steps, pads = weight.unsqueeze(-1), (1,), [1], [0]

    rows, channels = weight.shape[0] // groups, weight.shape[1]
    # One grouped convolution of all groups: (rows, groups * channels, k..) with (groups * rows, channels, k..).
    inputs = weight.reshape(groups, rows, channels, *kernel).transpose(0, 1).reshape(rows, groups * channels, *kernel)
    product = _CONVOLUTIONS[axes](inputs, weight, stride=tuple(steps), padding=tuple(pads), groups=groups)
    target = torch.zeros_like(product)
    centre: tuple[Any, ...] = (..., *(p // s for p, s in zip(pads, steps, strict=True)))
    identity = torch.eye(rows, dtype=weight.dtype, device=weight.device).repeat(1, groups)
    target[centre] = identity
    residual = product - target
    loss = residual.square().sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    return loss if squared else frobenius_norm(loss)


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
