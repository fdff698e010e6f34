"""Figures with matplotlib (extra ``plot``): every function takes an axis, draws on it and returns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .spectrum import FilterSimilarity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["frequency_map", "lambda_sweep", "loss_history", "similarity_histograms", "spectra"]


def spectra(ax: Axes, values: Mapping[str, Tensor], **style: Any) -> Axes:
    """Sorted singular values ``(V,)`` of each name, over their rank in percent: before and after, or layer by layer."""
    for name, spectrum in values.items():
        descending = spectrum.detach().cpu().double().sort(descending=True).values
        ax.plot(torch.linspace(0, 100, len(descending)).numpy(), descending.numpy(), label=name, **style)
    ax.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    ax.set(xlabel="rank (%)", ylabel="singular value", ylim=(0, None))
    ax.legend()
    return ax


def similarity_histograms(ax: Axes, similarities: Mapping[str, FilterSimilarity], bins: int = 40, **style: Any) -> Axes:
    """Share of filter pairs over their correlation, one outline per name."""
    for name, similarity in similarities.items():
        shares, edges = similarity.histogram(bins)
        ax.stairs(shares.numpy(), edges.numpy(), label=name, **style)
    ax.set(xlabel="correlation of two filters", ylabel="share of pairs", xlim=(-1, 1))
    ax.legend()
    return ax


def loss_history(ax: Axes, steps: Sequence[int], losses: Mapping[str, Sequence[float]], **style: Any) -> Axes:
    """Orthogonality loss of each layer over the steps at which it was logged, logarithmic."""
    for name, values in losses.items():
        ax.plot(steps, values, label=name, **style)
    ax.set(xlabel="step", ylabel="orthogonality loss", yscale="log")
    ax.legend()
    return ax


def lambda_sweep(ax: Axes, scores: Mapping[float, Sequence[float]], label: str = "accuracy", **style: Any) -> Axes:
    """Score over lambda (logarithmic; 0 is drawn at the left end): the mean of the runs, and the range they span."""
    positive = sorted(value for value in scores if value > 0)
    if not positive:
        raise ValueError(f"scores must have a positive lambda, got {sorted(scores)}")
    places = {value: value if value > 0 else positive[0] / 10 for value in sorted(scores)}
    means = [sum(scores[value]) / len(scores[value]) for value in places]
    spans = [
        [mean - min(scores[value]) for value, mean in zip(places, means, strict=True)],
        [max(scores[value]) - mean for value, mean in zip(places, means, strict=True)],
    ]
    ax.errorbar(list(places.values()), means, yerr=spans, marker="o", capsize=3, **style)
    ax.set(xscale="log", xlabel="lambda", ylabel=label)
    ax.set_xticks(list(places.values()), [f"{value:g}" for value in places])
    ax.minorticks_off()
    return ax


def frequency_map(ax: Axes, excess: Tensor, **style: Any) -> Axes:
    """Map ``(Q1, Q2)`` of :func:`ocnn_fused.spectrum.excess_by_frequency`, the constant input in the middle."""
    if excess.dim() != 2:
        raise ValueError(f"excess must have 2 dimensions, got shape {tuple(excess.shape)}")
    shifted = torch.fft.fftshift(excess.detach().cpu()).numpy()
    image = ax.imshow(shifted, extent=(-1, 1, -1, 1), origin="lower", **style)
    ax.figure.colorbar(image, ax=ax, label="loss above its least value")
    ax.set(xlabel="horizontal frequency / highest", ylabel="vertical frequency / highest")
    return ax
