"""Everything a user might pick instead, and ours: what each computes, how, and whether it does.

A contender is timed only after its losses and gradients have been compared with what it claims to compute
(definitions.py, float64). ``exact`` contenders compute the paper's loss, up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd, prod

import definitions
import torch
import torch.nn.functional as F
from definitions import srip_start
from shapes import Layer
from steps import PRECISIONS, TOLERANCES, Settings, WrongResultError
from torch import Tensor

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss, reference

Claim = Callable[[Tensor, Layer], Tensor]
Loss = Callable[[Tensor, Layer], Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to regularise: a loss per layer, or one call for all layers."""

    name: str
    formula: str
    claim: Claim
    loss: Loss
    every: Callable[[Sequence[Tensor], Sequence[Layer]], Tensor] | None = None  # losses of many layers in one call
    exact: bool = False
    ours: bool = False
    plain_only: bool = False  # Conv2d, square kernel, no groups, no dilation
    odd_only: bool = False

    def refusal(self, layer: Layer) -> str | None:
        """Why it cannot serve a layer."""
        if self.plain_only and (layer.groups > 1 or layer.dilation > 1 or len(layer.shape) != 4):
            return "Conv2d without groups and dilation only"
        if self.odd_only and not layer.shape[-1] % 2:
            return "odd kernels only"
        return None

    def serves(self, layers: Iterable[Layer]) -> bool:
        return all(self.refusal(layer) is None for layer in layers)

    def step(self, weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool) -> Sequence[Tensor]:
        """The losses of all layers, and with ``gradient`` fresh gradients in ``weight.grad``.

        What has no call for all layers loops over them; each gradient follows its loss at once, which keeps the
        memory lowest.
        """
        for weight in weights:
            weight.grad = None
        with torch.set_grad_enabled(gradient):
            if self.every is not None and len(weights) > 1:
                losses = self.every(weights, layers)
                if gradient:
                    losses.sum().backward()
                return losses.detach().unbind()
            separate = []
            for weight, layer in zip(weights, layers, strict=True):
                loss = self.loss(weight, layer)
                if gradient:
                    loss.backward()
                separate.append(loss.detach())
            return separate


# ----------------------------------------------------------------------------------------------------------------------
# The formulas of others, as their users write them
# ----------------------------------------------------------------------------------------------------------------------


def _reference(weight: Tensor, layer: Layer) -> Tensor:
    return reference.orth_loss(weight, layer.stride, dilation=layer.dilation, groups=layer.groups)


@lru_cache(maxsize=256)
def _compiled_for(geometry: object) -> Loss:
    """A compiled function of its own for every geometry, so that none is compiled for sizes that vary."""
    return torch.compile(lambda weight, layer: _reference(weight, layer), dynamic=False)


def _compiled(weight: Tensor, layer: Layer) -> Tensor:
    return _compiled_for((layer.geometry, weight.requires_grad))(weight, layer)


def _fourier(weight: Tensor, layer: Layer) -> Tensor:
    """Parseval on the smaller side: ``1/N sum_w ||A_w A_w^H - I||^2`` over the transform of the polyphase kernel."""
    groups, step = layer.groups, (layer.stride // gcd(layer.stride, layer.dilation),) * (weight.dim() - 2)
    rows, channels, taps = weight.shape[0] // groups, weight.shape[1], weight.shape[2:]
    counts = [-(-k // s) for k, s in zip(taps, step, strict=True)]
    kernel = weight.reshape(groups, rows, channels, *taps)
    if any(s > 1 for s in step):  # taps u = m*s + r: residues r become channels
        step = tuple(min(s, k) if m == 1 else s for s, k, m in zip(step, taps, counts, strict=True))
        padded = [m * s - k for m, s, k in zip(counts, step, taps, strict=True)]
        kernel = F.pad(kernel, [width for pad in reversed(padded) for width in (0, pad)])
        split = [size for pair in zip(counts, step, strict=True) for size in pair]
        kernel = kernel.reshape(groups, rows, channels, *split)
        axes = len(taps)
        order = [0, 1, 2, *(4 + 2 * axis for axis in range(axes)), *(3 + 2 * axis for axis in range(axes))]
        kernel = kernel.permute(order).reshape(groups, rows, channels * prod(step), *counts)
    sizes = [2 * m - 1 for m in counts]
    spectrum = torch.fft.rfftn(kernel, s=sizes, dim=tuple(range(3, kernel.dim())))
    spectrum = spectrum.flatten(3).permute(3, 0, 1, 2)  # frequency, group, row, channel
    twice = torch.full((sizes[-1] // 2 + 1,), 2.0, dtype=weight.dtype, device=weight.device)
    twice[0] = 1.0  # sizes are odd, so that frequency 0 alone is its own mirror image
    parts = twice.expand(*sizes[:-1], -1).reshape(-1, 1, 1, 1)
    width = spectrum.shape[-1]
    gram = spectrum @ spectrum.mH if rows <= width else spectrum.mH @ spectrum
    residual = gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    squares = (torch.view_as_real(residual).square().sum(-1) * parts).sum() / prod(sizes)
    return squares + groups * max(0, rows - width)


def _authors(weight: Tensor, layer: Layer) -> Tensor:
    return reference.official_orth_loss(weight, layer.stride)


def _deel_lip(weight: Tensor, layer: Layer) -> Tensor:
    kernel, stride = weight.shape[-1], layer.stride
    padding = (kernel - 1) // stride * stride
    product = F.conv2d(weight, weight, stride=stride, padding=padding)
    target = torch.zeros_like(product)
    middle = padding // stride
    target[:, :, middle, middle] = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
    return (product - target).square().sum() - max(0, weight.shape[0] - stride**2 * weight.shape[1])


def _isonet(weight: Tensor, layer: Layer) -> Tensor:
    rows = weight.shape[0] // layer.groups
    total = weight.new_zeros(())
    for kernel in weight.split(rows):
        kernel = kernel.transpose(0, 1) if kernel.shape[1] < rows else kernel
        product = F.conv2d(kernel, kernel, padding=[k - 1 for k in kernel.shape[2:]])
        target = torch.zeros_like(product)
        middle = [k - 1 for k in kernel.shape[2:]]
        target[:, :, middle[0], middle[1]] = torch.eye(len(kernel), dtype=weight.dtype, device=weight.device)
        total = total + 0.5 * (product - target).square().sum()
    return total


def _plain_kernel(weight: Tensor, layer: Layer) -> Tensor:
    matrix = weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1)
    if matrix.shape[1] > matrix.shape[2]:
        matrix = matrix.mT
    gram = matrix @ matrix.mT
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).square().sum()


def _plain_srip(weight: Tensor, layer: Layer) -> Tensor:
    matrix = weight.flatten(1)
    residual = matrix.mT @ matrix - torch.eye(matrix.shape[1], dtype=weight.dtype, device=weight.device)
    right = F.normalize(residual.mT @ _start_like(matrix), dim=0)
    left = F.normalize(residual @ right, dim=0)
    return left.dot(residual @ right).square()


@lru_cache(maxsize=16)
def _start_of(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return srip_start(size).to(device, dtype)


def _start_like(matrix: Tensor) -> Tensor:
    return _start_of(matrix.shape[1], matrix.dtype, matrix.device)


# ----------------------------------------------------------------------------------------------------------------------
# Ours
# ----------------------------------------------------------------------------------------------------------------------


def _fused(weight: Tensor, layer: Layer, backend: str | None = None) -> Tensor:
    return fused_orth_loss(weight, layer.stride, dilation=layer.dilation, groups=layer.groups, backend=backend)


def _fused_every(weights: Sequence[Tensor], layers: Sequence[Layer], padding: int | None = None) -> Tensor:
    return fused_orth_loss_foreach(
        weights,
        [layer.stride if padding is None else 1 for layer in layers],
        dilations=[layer.dilation if padding is None else 1 for layer in layers],
        groups=[layer.groups for layer in layers],
        paddings=padding,
    )


def _fused_kernel(weight: Tensor, layer: Layer) -> Tensor:
    return kernel_orth_loss(weight, groups=layer.groups)


REFERENCE, COMPILED, FOURIER, DEEL_LIP = "reference", "compiled reference", "FFT", "deel-lip"
ISONET, AUTHORS, KERNEL, SRIP = "ISONet", "authors' code", "kernel, plain", "SRIP"
FUSED, ONE_BY_ONE, FUSED_TORCH, FUSED_KERNEL = "fused", "fused, one by one", "fused, torch backend", "kernel, fused"

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(REFERENCE, "the paper's loss by F.conv2d and autograd", definitions.paper, _reference, exact=True),
        Contender(COMPILED, "the same under torch.compile", definitions.paper, _compiled, exact=True),
        Contender(
            FOURIER, "the paper's loss by rfftn, Parseval, on the smaller side, with autograd", definitions.paper,
            _fourier, exact=True,
        ),
        Contender(
            DEEL_LIP, "LorthRegularizer's: the paper's minus max(0, M - S*S*C)", definitions.deel_lip, _deel_lip,
            exact=True, plain_only=True, odd_only=True,
        ),
        Contender(ISONET, "half the squares of all offsets at stride 1, smaller side", definitions.isonet, _isonet),
        Contender(
            AUTHORS, "the published code: norm, padding 1", definitions.authors, _authors, plain_only=True
        ),
        Contender(
            KERNEL, "the squared norm of W W^T - I, flat weight, autograd", definitions.kernel_smaller, _plain_kernel
        ),
        Contender(
            SRIP, "spectral norm of W^T W - I, one power step, autograd", definitions.srip, _plain_srip,
            plain_only=True,
        ),
        Contender(
            FUSED, "the paper's loss, ours: one call", definitions.paper, _fused, _fused_every, exact=True, ours=True
        ),
        Contender(ONE_BY_ONE, "ours, a call per layer", definitions.paper, _fused, exact=True, ours=True),
        Contender(
            FUSED_TORCH, "ours, the same plan in PyTorch calls", definitions.paper, partial(_fused, backend="torch"),
            exact=True, ours=True,
        ),
        Contender(
            FUSED_KERNEL, "the squared norm of W W^T - I, ours", definitions.kernel_rows, _fused_kernel,
            partial(_fused_every, padding=0), ours=True,
        ),
    )
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Verification
# ----------------------------------------------------------------------------------------------------------------------

Outcome = tuple[Tensor, Tensor | None]  # a loss and, if asked for, its gradient


def tolerances_for(weight: Tensor) -> tuple[float, float]:
    rounded = weight.is_cuda and weight.dtype == torch.float32
    return PRECISIONS[torch.get_float32_matmul_precision()] if rounded else TOLERANCES[weight.dtype]


def difference(actual: Outcome, expected: Outcome, tolerances: tuple[float, float]) -> str | None:
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


class Judge:
    """Knows what each claim gives for the weights of some layers; computes each claim once, in float64."""

    def __init__(self, weights: Sequence[Tensor], layers: Sequence[Layer], gradient: bool) -> None:
        self.weights, self.layers, self.gradient = weights, layers, gradient
        self._known: dict[tuple[Claim, int], Outcome] = {}

    def _first_equal(self, index: int) -> int:
        """The first layer of the same geometry and weight, so that repeated layers are judged once."""
        for other in range(index):
            if self.layers[other].geometry == self.layers[index].geometry and torch.equal(
                self.weights[other], self.weights[index]
            ):
                return other
        return index

    def expected(self, claim: Claim, index: int) -> Outcome:
        index = self._first_equal(index)
        if (claim, index) not in self._known:
            exact = self.weights[index].detach().double().requires_grad_(self.gradient)
            with torch.set_grad_enabled(self.gradient):
                loss = claim(exact, self.layers[index])
            grad = torch.autograd.grad(loss, exact)[0] if self.gradient else None
            self._known[claim, index] = loss.detach(), grad
        return self._known[claim, index]

    def check(self, contender: Contender) -> None:
        """Raises :class:`WrongResultError` unless the contender computes what it claims; leaves it warmed up."""
        losses = contender.step(self.weights, self.layers, self.gradient)
        self.check_outcomes(contender.name, contender.claim, losses, ours=contender.ours)

    def check_outcomes(self, name: str, claim: Claim, losses: Sequence[Tensor], ours: bool = True) -> None:
        """The same for losses, and gradients in ``weight.grad``, that something else has computed.

        Plain float32 sums over millions of squares lose digits that ours do not.
        """
        of_loss, of_gradient = tolerances_for(self.weights[0])
        tolerances = (of_loss, of_gradient) if ours else (100 * of_loss, 10 * of_gradient)
        for index, (weight, layer, loss) in enumerate(zip(self.weights, self.layers, losses, strict=True)):
            if problem := difference((loss, weight.grad), self.expected(claim, index), tolerances):
                raise WrongResultError(f"{name}, {layer.label}: {problem}")


def calls_of(
    names: Iterable[str], weights: Sequence[Tensor], layers: Sequence[Layer], settings: Settings
) -> Mapping[str, Callable[[], object]]:
    """Verified calls of those contenders that serve the layers, ready to be timed."""
    judge = Judge(weights, layers, settings.gradient)
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        contender = CONTENDERS[name]
        if contender.serves(layers):
            judge.check(contender)
            calls[name] = partial(contender.step, weights, layers, settings.gradient)
    return calls
