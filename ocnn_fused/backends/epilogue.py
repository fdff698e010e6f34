"""What becomes of the gradients of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Epilogue(NamedTuple):
    """``factor * factors[l] * gradient`` is returned for each weight, or added to its target.

    No number of it is compiled or kept: each call may bring another. Where the gradients are returned for later,
    ``factors`` must not be changed before they are used.
    """

    factors: Tensor  # float64, contiguous, one per weight, where the weights are
    factor: float = 1.0
    targets: Sequence[Tensor] = ()  # one per weight, or none; may be the weights themselves
    per_target: bool = False  # divided by the free target of each group, unless that is zero

    def check(self, count: int, device: torch.device) -> None:
        """An error unless it fits ``count`` weights on a device."""
        factors = self.factors
        if (
            factors.dtype != torch.float64
            or factors.device != device
            or factors.shape != (count,)
            or not factors.is_contiguous()
        ):
            raise ValueError(
                f"factors must be {count} contiguous float64 numbers on {device}, got {tuple(factors.shape)} of "
                f"{factors.dtype} on {factors.device}"
            )
        if self.targets and len(self.targets) != count:
            raise ValueError(f"targets must be {count}, one per weight, or none, got {len(self.targets)}")

    def of(self, places: Sequence[int]) -> Epilogue:
        """For some of the weights."""
        begin, end = places[0], places[-1] + 1
        if end - begin == len(places):
            factors = self.factors[begin:end]
        else:  # not indexed by a list, which would have to be copied to the device
            factors = torch.stack([self.factors[place] for place in places])
        targets = [self.targets[place] for place in places] if self.targets else ()
        return Epilogue(factors, self.factor, targets, self.per_target)


def apply_epilogue(epilogue: Epilogue, place: int, weight: Tensor, grad: Tensor, groups: int) -> Tensor:
    """What a backend without an epilogue in its kernels returns for one weight; ``grad`` is changed in place."""
    factor = epilogue.factors[place] * epilogue.factor
    if epilogue.per_target:
        kernel = weight.unflatten(0, (groups, -1))
        free = torch.linalg.vector_norm(kernel.double(), dim=tuple(range(1, kernel.dim())), keepdim=True).square()
        free /= kernel.shape[1]
        grad.unflatten(0, (groups, -1)).div_(torch.where(free > 0, free, 1.0).to(grad.dtype))
    if not epilogue.targets:
        return grad.mul_(factor)
    epilogue.targets[place].addcmul_(grad, factor.to(grad.dtype))
    return grad.new_empty(0)
