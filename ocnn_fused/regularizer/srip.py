"""SRIP (Bansal et al., 2018), which the paper compares with: the spectral norm of the Gram residual."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.job import accumulation_dtype
from ..functional import check_weight
from ..problem import check_choice, problem_of
from .settings import check_positive

__all__ = ["srip_loss"]


def srip_loss(weight: Tensor, *, groups: int = 1, squared: bool = True, power_iterations: int = 8) -> Tensor:
    r"""Squared spectral norm of the flattened weight's Gram residual, as a 0-dim tensor.

    .. math:: L = \sigma_{\max}(W W^T - I)^2 = \max_i (s_i^2 - 1)^2, \quad W = (M, C k_1 \cdots k_n)

    with singular values :math:`s_i`. A weight with more rows than columns is worked on by columns
    (:math:`W^T W - I`): its row residual always has the eigenvalue -1 and says nothing. The original code takes columns
    always, and has that eigenvalue for weights with fewer rows. Groups add.

    The leading vector ``v`` comes from ``power_iterations`` steps from a fixed start: the same weight gives the same
    bits, there is no state, and the result is a lower bound that tightens with more steps. The gradient is that of
    ``||(W W^T - I) v||^2`` with ``v`` held, which at the leading vector is the gradient of the spectral norm. Cost:
    two matrix-vector products per step.

    Args:
        weight: ``(M, C/groups, k1..kn)``; half precision is computed in float32.
        groups: of the layer.
        squared: False returns the sum over groups of the spectral norms themselves.
        power_iterations: at least 1. The original code takes one step from a random start.
    """
    check_weight(weight)
    groups = problem_of(weight.shape, 1, 1, groups, 0).groups
    check_choice("squared", squared, (True, False))
    check_positive("power_iterations", power_iterations)
    with torch.autocast(weight.device.type, enabled=False):
        matrix = weight.to(accumulation_dtype(weight.dtype)).reshape(groups, weight.shape[0] // groups, -1)
        if matrix.shape[1] > matrix.shape[2]:
            matrix = matrix.transpose(1, 2)
        with torch.no_grad():
            vector = _start(matrix)
            for _ in range(power_iterations):
                vector = torch.nn.functional.normalize(_residual(matrix, vector), dim=1)
        image = _residual(matrix, vector)
        if squared:
            return image.square().sum()
        return torch.linalg.vector_norm(image, dim=(1, 2)).sum()


def _residual(matrix: Tensor, vector: Tensor) -> Tensor:
    """``(W W^T - I) v`` for every group, without the Gram matrix."""
    return matrix @ (matrix.transpose(1, 2) @ vector) - vector


def _start(matrix: Tensor) -> Tensor:
    """A fixed direction that no structure of a weight is likely to be orthogonal to."""
    groups, size, _ = matrix.shape
    index = torch.arange(1, size + 1, dtype=torch.float64, device=matrix.device)
    return torch.sin(index.square()).to(matrix.dtype).reshape(1, size, 1).expand(groups, size, 1)
