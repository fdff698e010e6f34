"""How alike the filters of a layer are: by their weights, and by what they see in images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Unpack

from ..modules import named_layers, unwrap
from .operator import LayerOptions, operator_of


@dataclass(frozen=True)
class FilterSimilarity:
    """``correlation``: (images, M, M), the correlation of every two filters for each image; one "image" for weights."""

    correlation: Tensor

    @property
    def off_diagonal(self) -> Tensor:
        """Entries above the diagonal of all images, ``(images * M (M - 1) / 2,)``."""
        filters = self.correlation.shape[-1]
        row, column = torch.triu_indices(filters, filters, 1)
        return self.correlation[:, row, column].flatten()

    @property
    def mean_magnitude(self) -> float:
        """Mean absolute correlation of two different filters; 0 for a single filter."""
        entries = self.off_diagonal
        return float(entries.abs().mean()) if len(entries) else 0.0

    def histogram(self, bins: int = 40) -> tuple[Tensor, Tensor]:
        """Shares of the off-diagonal entries in equal intervals of [-1, 1], (bins,), and their edges, (bins + 1,)."""
        entries = self.off_diagonal.clamp(-1, 1).double().cpu()
        counts, edges = torch.histogram(entries, torch.linspace(-1, 1, bins + 1, dtype=torch.float64))
        return counts / max(1, len(entries)), edges


def correlation(rows: Tensor) -> Tensor:
    r"""``corr(G) = diag(K_{GG})^{-1/2} K_{GG} diag(K_{GG})^{-1/2}`` of ``G`` (..., M, N), as in the paper.

    ``K_GG`` is the covariance of the rows, each about its own mean. A constant row correlates with nothing: 0.
    """
    centred = rows - rows.mean(-1, keepdim=True)
    length = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    # What is left of a constant row is rounding.
    constant = length <= 1e-6 * torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    normal = torch.where(constant, 0.0, centred / length.where(~constant, torch.ones_like(length)))
    return normal @ normal.mT


def weight_similarity(layer: Tensor | nn.Module, **options: Unpack[LayerOptions]) -> FilterSimilarity:
    """Of the flattened filters ``(M, C * k1 * .. * kn)``, groups together: the cheap version, without images."""
    return FilterSimilarity(correlation(operator_of(layer, **options).filters)[None])


def filter_similarity(
    model: nn.Module, images: Tensor, layers: Iterable[str] | None = None, *, max_filters: int | None = None
) -> dict[str, FilterSimilarity]:
    """The paper's measure, by layer name: correlations of guided back-propagation patterns.

    For every image the strongest unit of each channel of a layer's output is followed back to the input, passing only
    positive gradients through ReLUs that were active (Springenberg et al.). The patterns of a layer, ``G`` of
    (M, C*H*W), give the matrix ``corr(G)`` of :func:`correlation`. One backward pass of the batch per channel:
    ``max_filters`` takes that many channels, evenly spread. ``images`` are (B, C, H, W), or whatever the model takes;
    ``layers`` default to all convolutions and Linear layers that the images reach. The model is put into eval mode for
    the duration, and no gradient is left behind.
    """
    plain = unwrap(model)
    modules = dict(named_layers(plain))
    wanted = list(modules) if layers is None else list(layers)
    missing = [name for name in wanted if name not in modules]
    if missing:
        raise ValueError(f"layers must be names of the model's layers, got {missing[0]!r}")
    inputs = images.detach().clone().requires_grad_()
    outputs: dict[str, Tensor] = {}

    def note(name: str, _module: nn.Module, _arguments: Any, output: Tensor) -> None:
        outputs[name] = output

    with ExitStack() as hooks, evaluation(plain), torch.enable_grad(), _GuidedReLUs():
        for name in wanted:
            hooks.enter_context(modules[name].register_forward_hook(partial(note, name)))
        plain(inputs)
    return {
        name: FilterSimilarity(_correlation_of_patterns(outputs[name], inputs, max_filters))
        for name in wanted
        if name in outputs
    }


def _correlation_of_patterns(output: Tensor, inputs: Tensor, max_filters: int | None) -> Tensor:
    units = output.reshape(*output.shape[:2], -1).amax(-1)  # of every image and channel the strongest
    channels = units.shape[1]
    count = channels if max_filters is None else min(channels, max_filters)
    chosen = [index * channels // count for index in range(count)]
    patterns = torch.stack(
        [torch.autograd.grad(units[:, channel].sum(), inputs, retain_graph=True)[0].flatten(1) for channel in chosen]
    )
    return correlation(patterns.transpose(0, 1)).detach()


class _GuidedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0].clamp(min=0) * (x > 0)


class _GuidedReLUs(TorchFunctionMode):
    """Replaces ReLUs, modules and functions alike, while it is active."""

    _FUNCTIONS = (F.relu, torch.relu, Tensor.relu)
    _IN_PLACE = (F.relu_, torch.relu_, Tensor.relu_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._FUNCTIONS:
            return _GuidedReLU.apply((*args, *(kwargs or {}).values())[0])
        if func in self._IN_PLACE:
            return args[0].copy_(_GuidedReLU.apply(args[0].clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
