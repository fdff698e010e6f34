"""What trainings share: batches, augmentation, one step, evaluation in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import Labelled
from .methods import Regularization

CLIP = 5.0  # largest norm of the gradient, for all methods: the orthogonality loss grows with the fourth power


def batch_indices(seed: int, step: int, count: int, batch: int) -> Tensor:
    """Indices of the images of one step; every image once per epoch, without a state to be saved."""
    batch = min(batch, count)
    per_epoch = count // batch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1000003 * seed + step // per_epoch))
    start = step % per_epoch * batch
    return order[start : start + batch]


def augmented(images: Tensor, shift: int) -> Tensor:
    """Each image shifted by up to ``shift`` pixels and mirrored or not."""
    count, _, height, width = images.shape
    padded = F.pad(images, (shift,) * 4)
    top, left = torch.randint(2 * shift + 1, (2, count, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    mirrored = torch.rand(count, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Normalize:
    """Bytes to numbers of mean 0 and deviation 1 in each channel; channels last in memory, which is faster here."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, images: Tensor) -> Normalize:
        sample = images[:2000].float()
        return cls(sample.mean((0, 2, 3), keepdim=True), sample.std((0, 2, 3), keepdim=True))

    def __call__(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.std).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def in_parts(function: Callable[[Tensor], Tensor], images: Tensor, size: int = 250) -> Tensor:
    """``function`` of all images, some at a time."""
    return torch.cat([function(part) for part in images.split(size)])


def cosine(step: int, steps: int) -> float:
    """Factor of the learning rate: up in the first twentieth, then down half a cosine."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * (1 + cos(pi * step / steps)) / 2


def update(
    loss: Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    regularization: Regularization,
    clips_all: bool = True,
) -> None:
    """One optimiser step of the task's loss and what the method adds to it.

    ``clips_all``: the gradient of both is cut to the largest norm; else that of the task alone.
    """
    penalty = regularization.loss()
    (loss + penalty if clips_all else loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if not clips_all and penalty.requires_grad:
        penalty.backward()
    optimizer.step()
    optimizer.zero_grad()
    regularization.after_step()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def held_back(data: Labelled, share: float = 0.1) -> tuple[Labelled, Labelled]:
    """The training images without a tenth, and that tenth: on it settings are chosen. The same for every seed."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(12345))
    count = max(1, round(share * len(data)))
    return data.take(order[count:]), data.take(order[:count])


State = dict[str, Any]
