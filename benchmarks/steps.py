"""What is measured: one step of the regulariser by the fused call and by the reference, and whether they agree."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from shapes import Layer
from torch import Tensor

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach
from ocnn_fused.reference import orth_loss

Implementation = Literal["reference", "fused"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "fused")

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
    """The fused result differs from the reference, so its speed means nothing."""


def usual_device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def results_folder(device: str) -> Path:
    """Where results of a device are kept unless another folder is named: those of GPUs apart."""
    folder = Path(__file__).resolve().parent / "results"
    return folder if device == "cpu" else folder / device.partition(":")[0]


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
    """Random weights as He initialisation gives them, the same ones every time.

    Their rows are longer than 1, so that ``Z_0 - I`` is not a small difference that leaves few correct digits.
    """
    generator = torch.Generator().manual_seed(0)
    weights = []
    for layer in layers:
        weight = torch.randn(layer.shape, generator=generator) * (2 / prod(layer.shape[1:])) ** 0.5
        weights.append(weight.to(settings.device, settings.dtype).requires_grad_(settings.gradient))
    return weights


def _reference_step(weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool) -> list[Tensor]:
    """A loop over the layers. Each gradient follows its loss at once, which keeps the reference's memory lowest."""
    losses = []
    for weight, layer in zip(weights, layers, strict=True):
        loss = orth_loss(weight, layer.stride, dilation=layer.dilation, groups=layer.groups)
        if gradient:
            loss.backward()
        losses.append(loss.detach())
    return losses


def _fused_step(weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool) -> Sequence[Tensor]:
    """One call, whether for one layer or for a network."""
    if len(weights) == 1:
        layer = layers[0]
        loss = fused_orth_loss(weights[0], layer.stride, dilation=layer.dilation, groups=layer.groups)
        losses: Sequence[Tensor] = (loss,)
    else:
        per_layer = fused_orth_loss_foreach(
            weights,
            [layer.stride for layer in layers],
            dilations=[layer.dilation for layer in layers],
            groups=[layer.groups for layer in layers],
        )
        loss, losses = per_layer.sum(), per_layer  # type: ignore[assignment]
    if gradient:
        loss.backward()
    return losses


def run_step(
    implementation: Implementation, weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool
) -> Sequence[Tensor]:
    """The losses of all layers, and with ``gradient`` fresh gradients in ``weight.grad``."""
    for weight in weights:
        weight.grad = None
    with torch.set_grad_enabled(gradient):
        return (_fused_step if implementation == "fused" else _reference_step)(weights, layers, gradient)


Outcome = tuple[Tensor, Tensor | None]  # a loss and, if asked for, its gradient


def _outcomes(
    implementation: Implementation, weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool
) -> list[Outcome]:
    losses = run_step(implementation, weights, layers, gradient)
    return [(loss.detach(), weight.grad) for loss, weight in zip(losses, weights, strict=True)]


def _reference_outcomes(
    weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool, dtype: torch.dtype
) -> list[Outcome]:
    copies = [weight.detach().to(dtype, copy=True).requires_grad_(gradient) for weight in weights]
    return _outcomes("reference", copies, layers, gradient)


def _difference(actual: Outcome, expected: Outcome, tolerances: tuple[float, float]) -> str | None:
    """What is wrong with an outcome, in a few words; None if nothing is."""
    for what, got, wanted, tolerance in zip(("loss", "gradient"), actual, expected, tolerances, strict=True):
        if got is None or wanted is None:
            if got is not wanted:
                return f"the {what} is missing, or there although it was not asked for"
            continue
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
        if not error <= tolerance:  # also true of NaN
            return f"the {what} is off by {error:.2e} (relative); {tolerance:.0e} is allowed"
    return None


def check_step(weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool) -> None:
    """Raise :class:`WrongResultError` unless the fused losses and gradients for ``weights`` are right.

    The reference is the first judge. Its float32 sums over thousands of terms can be off themselves, so where the two
    differ the reference in float64, which would be too slow for every layer, has the last word.
    """
    rounded = weights[0].is_cuda and weights[0].dtype == torch.float32
    tolerances = PRECISIONS[torch.get_float32_matmul_precision()] if rounded else TOLERANCES[weights[0].dtype]
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    expected = _reference_outcomes(weights, layers, gradient, wide)
    actual = _outcomes("fused", weights, layers, gradient)
    for index, layer in enumerate(layers):
        if _difference(actual[index], expected[index], tolerances) is None:
            continue
        [exact] = _reference_outcomes([weights[index]], [layer], gradient, torch.float64)
        if problem := _difference(actual[index], exact, tolerances):
            raise WrongResultError(f"{layer.label}: {problem}")
