"""What every contender claims to compute, in float64 from sums over pairs of taps: no convolution, no plan, no FFT.

With ``Z_d = sum_{u - v = d} K_u K_v^T`` for an offset ``d`` of taps (a vector), all formulas of the field are sums over
some offsets. The claims are differentiable; gradients come from autograd. Weights are ``(M, C/groups, k1..kn)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import gcd, prod

import torch
from shapes import Layer
from torch import Tensor


def _grouped(weight: Tensor, groups: int) -> Tensor:
    """``(groups, rows, channels, k1..kn)``; a Linear weight is a kernel of one tap."""
    taps = weight.shape[2:] or (1,)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], *taps)


def correlation(kernels: Tensor, offset: tuple[int, ...]) -> Tensor:
    """``Z_d`` of grouped kernels, ``(groups, rows, rows)``: rows of the first factor are ``d`` taps ahead."""

    def taps(sign: int) -> Tensor:
        kept, pairs = kernels, zip(offset, kernels.shape[3:], strict=True)
        for axis, (d, k) in enumerate(pairs, 3):
            kept = kept.narrow(axis, max(sign * d, 0), k - abs(d))
        return kept.flatten(2)

    return taps(1) @ taps(-1).mT


def _residuals(kernels: Tensor, offsets: Iterable[tuple[int, ...]], centre: tuple[int, ...]) -> Tensor:
    """Sum of squares of ``Z_d - [d = centre] I`` over the offsets."""
    total = (0 * kernels).sum()  # differentiable also where no offset is left
    for offset in offsets:
        product = correlation(kernels, offset)
        if offset == centre:
            product = product - torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
        total = total + product.square().sum()
    return total


def _axes(kernels: Tensor) -> int:
    return kernels.dim() - 3


def paper(weight: Tensor, layer: Layer) -> Tensor:
    """The paper's loss: every offset that is a multiple of the stride (of stride / gcd(stride, dilation))."""
    kernels = _grouped(weight, layer.groups)
    step = layer.stride // gcd(layer.stride, layer.dilation)
    lags = [range(-((k - 1) // step) * step, k, step) for k in kernels.shape[3:]]
    return _residuals(kernels, itertools.product(*lags), (0,) * _axes(kernels))


def deel_lip(weight: Tensor, layer: Layer) -> Tensor:
    """deel-lip's: the paper's minus the least value that more filters than ``S*S*C`` leave."""
    return paper(weight, layer) - max(0, weight.shape[0] - layer.stride**2 * weight.shape[1])


def authors(weight: Tensor, layer: Layer) -> Tensor:
    """The published code's: the norm, at the offsets that a padding of 1 reaches, the identity on the middle one."""
    kernels = _grouped(weight, 1)
    offsets = [layer.stride * index - 1 for index in range(2 // layer.stride + 1)]
    middle = offsets[len(offsets) // 2]
    kept = [offset for offset in offsets if abs(offset) < weight.shape[-1]]
    axes = _axes(kernels)
    squares = _residuals(kernels, itertools.product(*[kept] * axes), (middle,) * axes)
    if middle not in kept:  # the identity meets nothing but zeros
        squares = squares + weight.shape[0]
    return squares.sqrt()


def isonet(weight: Tensor, layer: Layer) -> Tensor:
    """ISONet's: half of the squares at every offset whatever the stride, on the smaller side."""
    kernels = _grouped(weight, layer.groups)
    if kernels.shape[2] < kernels.shape[1]:
        kernels = kernels.transpose(1, 2)
    lags = [range(-(k - 1), k) for k in kernels.shape[3:]]
    return 0.5 * _residuals(kernels, itertools.product(*lags), (0,) * _axes(kernels))


def kernel_rows(weight: Tensor, layer: Layer) -> Tensor:
    """Kernel orthogonality: ``||W W^T - I||^2`` of the flattened weight."""
    kernels = _grouped(weight, layer.groups)
    none = (0,) * _axes(kernels)
    return _residuals(kernels, itertools.product(*[(0,)] * len(none)), none)


def kernel_smaller(weight: Tensor, layer: Layer) -> Tensor:
    """The same on the smaller Gram matrix, as public code takes it: less by the constant ``M - C*k1*..*kn``."""
    rows, columns = weight.shape[0] // layer.groups, prod(weight.shape[1:])
    return kernel_rows(weight, layer) - layer.groups * max(0, rows - columns)


def srip_start(size: int) -> Tensor:
    """Where the power iteration begins: random, the same for the contender and for its claim."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def srip(weight: Tensor, layer: Layer) -> Tensor:
    """SRIP's published estimate of the squared spectral norm of ``W^T W - I``: one power step, all in the graph."""
    matrix = weight.flatten(1)

    def residual(vector: Tensor) -> Tensor:
        return matrix.mT @ (matrix @ vector) - vector

    right = torch.nn.functional.normalize(residual(srip_start(matrix.shape[1]).to(weight)), dim=0)
    left = torch.nn.functional.normalize(residual(right), dim=0)
    return left.dot(residual(right)).square()
