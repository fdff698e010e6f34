"""What the report says of a network: numbers per layer, and a sentence for each that stands out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import orth_losses
from ..modules import label, named_layers, unwrap
from ..plan import least_loss
from ..problem import DEFAULT_OPTIONS
from ..spectrum import FilterSimilarity, dead_filters, filter_similarity, layer_sizes, summary, values_by_frequency
from ..spectrum.network import circular_size
from ..spectrum.operator import operator_of
from ..spectrum.similarity import weight_similarity
from ..spectrum.values import with_progress

_CURVE_POINTS = 120
_HISTOGRAM_BINS = 40
_MAP_SIDE = 28


@dataclass(frozen=True)
class LayerReport:
    """One layer of one network. Curves, histogram and map are for figures; all else is in the table."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    input_size: tuple[int, ...]
    loss: float
    least_loss: int
    largest: float
    largest_at: str
    smallest: float
    smallest_at: str
    median: float
    near_one: float
    effective_rank: float
    values: int
    dead: tuple[int, ...]
    similarity: float
    curve: tuple[float, ...]  # sorted singular values at evenly spaced ranks
    histogram: tuple[float, ...]  # shares of filter pairs, correlation -1 to 1
    excess: tuple[tuple[float, ...], ...]  # loss above its least value by frequency, the constant input in the middle

    @property
    def above_least(self) -> float:
        return max(0.0, self.loss - self.least_loss)

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "above_least": self.above_least}


@dataclass(frozen=True)
class NetworkReport:
    """All layers that an input reaches, by name, and those that were left out, with the reason."""

    title: str
    layers: dict[str, LayerReport]
    left_out: dict[str, str] = field(default_factory=dict)


def measure(
    model: nn.Module,
    input_shape: Iterable[int] | Tensor,
    *,
    title: str,
    layers: Iterable[str] | None = None,
    images: Tensor | None = None,
    progress: bool = False,
) -> NetworkReport:
    """Look at every layer of ``model``; with ``images`` filter similarity is the paper's, else that of the weights."""
    modules = dict(named_layers(unwrap(model)))
    names = list(modules) if layers is None else list(layers)
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(f"layers must be names of the model's layers, got {unknown[0]!r}")
    sizes = layer_sizes(model, input_shape)
    similarities = {} if images is None else filter_similarity(model, images, names)
    found, left_out = {}, {}
    for name in with_progress(names, progress, title, len(names)):
        if name not in sizes:
            left_out[label(name)] = "the input does not reach it"
            continue
        similarity = similarities[name] if name in similarities else weight_similarity(modules[name])
        try:
            with torch.no_grad():
                found[label(name)] = _layer(label(name), modules[name], sizes[name], similarity)
        except ValueError as error:
            left_out[label(name)] = str(error)
    return NetworkReport(title, found, left_out)


def _layer(name: str, module: nn.Module, size: tuple[int, ...], similarity: FilterSimilarity) -> LayerReport:
    operator = operator_of(module)
    problem = operator.problem
    by_frequency = values_by_frequency(module, circular_size(module, size), progress=False).cpu()
    unseen = by_frequency.new_zeros(by_frequency[..., 0].numel() * operator.unseen_zeros)
    values = torch.cat([by_frequency.flatten().sort(descending=True).values, unseen])
    found = summary(values).as_floats()
    ranks = torch.linspace(0, len(values) - 1, min(_CURVE_POINTS, len(values))).round().long()
    shares, _ = similarity.histogram(_HISTOGRAM_BINS)
    excess = (by_frequency.square() - 1).square().sum(-1)
    smallest_at = "pixels that no tap sees" if len(unseen) else _where(by_frequency.amin(-1).argmin(), excess.shape)
    return LayerReport(
        name=name,
        kind=type(module).__name__,
        shape=problem.shape,
        stride=problem.stride,
        groups=problem.groups,
        input_size=size,
        loss=orth_losses([operator.weight], (problem,), DEFAULT_OPTIONS)[0].item(),
        least_loss=int(least_loss(problem)),
        largest_at=_where(by_frequency.amax(-1).argmax(), excess.shape),
        smallest_at=smallest_at,
        values=len(values),
        dead=tuple(dead_filters(module)),
        similarity=similarity.mean_magnitude,
        curve=_rounded(values[ranks]),
        histogram=_rounded(shares),
        excess=_map(excess),
        **found,
    )


def _where(flat: Tensor, counts: torch.Size) -> str:
    """A frequency in words; of every axis the share of the highest that it has."""
    shares = []
    for count, index in zip(counts, torch.unravel_index(flat, counts), strict=True):
        if count > 1:
            shares.append(min(int(index), count - int(index)) / (count // 2))
    if not shares:
        return "the only frequency"
    if max(shares) == 0:
        return "constant input"
    if min(shares) >= 0.9:
        return "the highest frequency"
    return "frequency " + " x ".join(f"{share:.2f}" for share in shares) + " of the highest"


def _map(excess: Tensor) -> tuple[tuple[float, ...], ...]:
    """Two axes (a third is averaged, a single one is one row), the constant input in the middle, coarser if large."""
    while excess.dim() > 2:
        excess = excess.mean(0)
    plane = torch.fft.fftshift(excess.reshape(1, -1) if excess.dim() < 2 else excess)
    sides = (min(plane.shape[0], _MAP_SIDE), min(plane.shape[1], _MAP_SIDE))
    coarse = torch.nn.functional.adaptive_avg_pool2d(plane[None, None], sides)[0, 0]
    return tuple(_rounded(row) for row in coarse)


def _rounded(values: Tensor) -> tuple[float, ...]:
    """To what a figure can show."""
    return tuple(float(f"{value:.5g}") for value in values.tolist())


#: How many layers of a kind get a sentence each.
_ALONE = 3


def findings(network: NetworkReport) -> list[str]:
    """What stands out: of every kind in turn, the worst first; what many layers share is said once."""
    layers = list(network.layers.values())
    kinds = {
        "have dead filters": [
            (len(layer.dead) / layer.shape[0], f"{layer.name}: {len(layer.dead)} of {layer.shape[0]} filters are dead.")
            for layer in layers
            if layer.dead
        ],
        "have singular values near zero": [
            (-layer.smallest, f"{layer.name}: smallest singular value {layer.smallest:.2g} at {layer.smallest_at}.")
            for layer in layers
            if layer.smallest < 0.1 * max(1.0, layer.median)
        ],
        "have singular values above 2": [
            (layer.largest, f"{layer.name}: largest singular value {layer.largest:.2f} at {layer.largest_at}.")
            for layer in layers
            if layer.largest > 2
        ],
        "have filters that are alike": [
            (
                layer.similarity,
                f"{layer.name}: its filters are alike, with a mean correlation of {layer.similarity:.2f}.",
            )
            for layer in layers
            if layer.similarity > 0.3
        ],
        "have at least 90% of their singular values within 10% of 1": [
            (layer.near_one, f"{layer.name}: {layer.near_one:.0%} of the singular values lie within 10% of 1.")
            for layer in layers
            if layer.near_one >= 0.9
        ],
    }
    columns = []
    for common, kind in kinds.items():
        sentences = [text for _, text in sorted(kind, key=lambda pair: -pair[0])]
        if len(sentences) > _ALONE:
            sentences = [f"{len(sentences)} of {len(layers)} layers {common}, above all {sentences[0]}"]
        columns.append(sentences)
    return [text for row in zip_longest(*columns) for text in row if text is not None]


def comparisons(before: NetworkReport, after: NetworkReport) -> list[str]:
    """How the layers of two networks differ, the largest change of the share near 1 first."""
    pairs = [(before.layers[name], layer) for name, layer in after.layers.items() if name in before.layers]
    pairs.sort(key=lambda pair: -abs(pair[1].near_one - pair[0].near_one))
    return [
        f"{old.name}: {old.near_one:.0%} of the singular values within 10% of 1 in {before.title}, {new.near_one:.0%} "
        f"in {after.title}; largest {old.largest:.2f} and {new.largest:.2f}, smallest {old.smallest:.2g} and "
        f"{new.smallest:.2g}."
        for old, new in pairs
    ]
