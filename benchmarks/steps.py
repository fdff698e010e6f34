"""What all measurements share: settings, weights, and how exact a result must be to count as right."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from shapes import Layer
from torch import Tensor, nn

#: Largest relative error of (a loss, a gradient) that still counts as the same result. Half types are compared with the
#: float32 reference of the same weights, so theirs is the rounding of the gradient to the weight's dtype.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
}

#: The same for float32 weights whose products on a GPU are rounded to TF32 or bfloat16, in torch's words for it. The
#: reference is rounded too, but it is float64 that has the last word.
PRECISIONS: dict[str, tuple[float, float]] = {
    "highest": TOLERANCES[torch.float32],
    "high": (2e-3, 1e-2),
    "medium": (2e-2, 1e-1),
}

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}


class WrongResultError(Exception):
    """A result is not what was claimed, so its speed means nothing."""


def usual_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Settings:
    """What all measurements of one run share."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int = 2
    gradient: bool = True
    precision: str = "highest"  # of float32 products, for both contestants; matters on a GPU only

    def apply(self) -> None:
        """Sets torch's global state; convolutions on a GPU have a switch of their own."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.cudnn.allow_tf32 = self.precision != "highest"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def expand(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Every layer as often as its count says."""
    return tuple(itertools.chain.from_iterable([layer] * layer.count for layer in layers))


def make_weights(layers: Sequence[Layer], settings: Settings) -> list[Tensor]:
    """Random weights as He initialisation gives them, the same ones every time and in layers of equal geometry.

    Their rows are longer than 1, so that ``Z_0 - I`` is not a small difference that leaves few correct digits.
    """
    weights = []
    for layer in layers:
        generator = torch.Generator().manual_seed(sum(layer.shape))
        weight = torch.randn(layer.shape, generator=generator) * (2 / prod(layer.shape[1:])) ** 0.5
        weights.append(weight.to(settings.device, settings.dtype).requires_grad_(settings.gradient))
    return weights


def module_of(layer: Layer) -> nn.Conv2d:
    """A module with the layer's geometry; its weight holds no memory."""
    rows, channels, height, width = layer.shape
    inputs = channels * layer.groups
    return nn.Conv2d(inputs, rows, (height, width), layer.stride, groups=layer.groups, bias=False, device="meta")
