"""Scores of retrieval, clustering, inpainting and generation, from their definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor, k: int = 1) -> float:
    """Share of rows of ``logits`` (N, classes) with the label among the ``k`` largest, or all if there are fewer."""
    k = min(k, logits.shape[1])
    return (logits.topk(k, 1).indices == labels[:, None]).any(1).double().mean().item()


def nearest(queries: Tensor, gallery: Tensor | None, k: int) -> Tensor:
    """Indices (N, k) of the nearest rows by cosine, nearest first; without a gallery, of the other queries."""
    queries = torch.nn.functional.normalize(queries.double(), dim=1)
    others = queries if gallery is None else torch.nn.functional.normalize(gallery.double(), dim=1)
    rows = []
    for start in range(0, len(queries), 1024):
        similarity = queries[start : start + 1024] @ others.T
        if gallery is None:
            own = torch.arange(len(similarity))
            similarity[own, own + start] = -math.inf
        rows.append(similarity.topk(k, 1).indices)
    return torch.cat(rows)


def hit_rates(found: Tensor, labels: Tensor, ks: Sequence[int]) -> dict[int, float]:
    """Recall@k: share of rows of ``found`` (N, K), labels of the neighbours, with their own label among the first k."""
    hits = found == labels[:, None]
    return {k: hits[:, :k].any(1).double().mean().item() for k in ks}


def _contingency(a: Tensor, b: Tensor) -> Tensor:
    """Counts (classes of a, classes of b), float64."""
    a, b = (torch.unique(x, return_inverse=True)[1] for x in (a, b))
    width = int(b.max()) + 1
    return torch.bincount(a * width + b, minlength=(int(a.max()) + 1) * width).reshape(-1, width).double()


def _entropy(counts: Tensor) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


def normalized_mutual_information(a: Tensor, b: Tensor) -> float:
    """``2 I(a; b) / (H(a) + H(b))`` of two labellings; 1 if both have one class only."""
    counts = _contingency(a, b)
    first, second = _entropy(counts.sum(1)), _entropy(counts.sum(0))
    if first + second == 0:
        return 1.0
    return 2 * (first + second - _entropy(counts.flatten())) / (first + second)


def pair_f1(labels: Tensor, clusters: Tensor) -> float:
    """F1 of the decision "same cluster" for "same class" over all pairs of items."""
    counts = _contingency(labels, clusters)

    def pairs(n: Tensor) -> float:
        return float((n * (n - 1) / 2).sum())

    both, same_class, same_cluster = pairs(counts), pairs(counts.sum(1)), pairs(counts.sum(0))
    return 2 * both / (same_class + same_cluster) if same_class + same_cluster else 0.0


def psnr(image: Tensor, truth: Tensor, where: Tensor | None = None) -> float:
    """``-10 log10 of the mean squared error`` of images from 0 to 1, or of the pixels where a mask is 1."""
    squares = (image.double() - truth.double()) ** 2
    if where is not None:
        squares = squares[where.expand_as(squares).bool()]
    return -10 * math.log10(squares.mean().item())


def frechet_distance(a: Tensor, b: Tensor) -> float:
    r"""``|m - n|^2 + tr(S + T - 2 (S T)^{1/2})`` for means and covariances of the rows of ``a`` and ``b`` (N, D)."""
    a, b = a.double(), b.double()
    S, T = torch.cov(a.T), torch.cov(b.T)
    # (S T) has the eigenvalues of the symmetric S^1/2 T S^1/2.
    values, vectors = torch.linalg.eigh(S)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ T @ root).clamp(min=0).sqrt().sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + S.trace() + T.trace() - 2 * cross)


def class_score(probabilities: Tensor) -> float:
    """The formula of the Inception Score: ``exp E KL(p(y|x) || p(y))`` of ``probabilities`` (N, classes)."""
    p = probabilities.double().clamp(min=1e-12)
    return float((p * (p.log() - p.mean(0).log())).sum(1).mean().exp())
