"""Scores of the experiments against scikit-learn and against their definitions, pair by pair."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from sklearn import metrics as sklearn_metrics
from sklearn.neighbors import NearestNeighbors

from experiments import metrics


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("classes", "clusters"), [(2, 5), (7, 3), (1, 4), (1, 1), (20, 20)])
def test_clustering_scores(classes: int, clusters: int) -> None:
    labels, found = torch.randint(classes, (60,)), 3 * torch.randint(clusters, (60,))  # numbers may have gaps
    expected = sklearn_metrics.normalized_mutual_info_score(labels, found)
    assert metrics.normalized_mutual_information(labels, found) == pytest.approx(expected, abs=1e-12)
    pairs = list(combinations(range(60), 2))
    same_class = [labels[i] == labels[j] for i, j in pairs]
    same_cluster = [found[i] == found[j] for i, j in pairs]
    assert metrics.pair_f1(labels, found) == pytest.approx(sklearn_metrics.f1_score(same_class, same_cluster))


def test_mutual_information_from_its_definition() -> None:
    a, b = torch.randint(3, (40,)), torch.randint(4, (40,))

    def share(event: torch.Tensor) -> float:
        return event.double().mean().item()

    information = entropy = 0.0
    for i in range(3):
        entropy -= share(a == i) * math.log(share(a == i))
        for j in range(4):
            both = share((a == i) & (b == j))
            information += both * math.log(both / (share(a == i) * share(b == j))) if both else 0.0
    entropy -= sum(share(b == j) * math.log(share(b == j)) for j in range(4))
    assert metrics.normalized_mutual_information(a, b) == pytest.approx(2 * information / entropy)


def test_neighbours_are_those_of_scikit_learn() -> None:
    queries, gallery = torch.randn(30, 5), torch.randn(50, 5)
    expected = NearestNeighbors(n_neighbors=4, metric="cosine").fit(gallery.double()).kneighbors(queries.double())[1]
    assert metrics.nearest(queries, gallery, 4).tolist() == expected.tolist()


def test_recall_from_its_definition() -> None:
    vectors, labels = torch.randn(1100, 3), torch.randint(6, (1100,))  # more than one part
    found = labels[metrics.nearest(vectors, None, 8)]
    rates = metrics.hit_rates(found, labels, (1, 2, 4, 8))
    normal = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    for k, rate in rates.items():
        hits = 0
        for i in range(0, 1100, 50):
            others = sorted((j for j in range(1100) if j != i), key=lambda j: -float(normal[i] @ normal[j]))[:k]
            own = any(labels[j] == labels[i] for j in others)
            assert own == bool((found[i, :k] == labels[i]).any())
            hits += own
        assert 0 <= rate <= 1
    assert rates[1] < rates[8]


def test_accuracy() -> None:
    logits = torch.tensor([[3.0, 2, 1], [1, 2, 3], [2, 1, 3], [0, 1, 2]])
    labels = torch.tensor([0, 0, 0, 2])
    assert metrics.accuracy(logits, labels) == 0.5
    assert metrics.accuracy(logits, labels, 2) == 0.75
    assert metrics.accuracy(logits, labels, 5) == 1.0


def test_psnr() -> None:
    truth = torch.zeros(1, 2, 2)
    image = torch.tensor([[[0.1, 0.1], [0.3, 0.1]]])
    assert metrics.psnr(image, truth) == pytest.approx(-10 * math.log10(0.12 / 4), rel=1e-6)
    assert metrics.psnr(image, truth, torch.tensor([[[1, 1], [0, 1]]])) == pytest.approx(20, rel=1e-6)


def test_frechet_distance() -> None:
    mean, deviation = torch.tensor([1.0, 0, 0]), torch.tensor([2.0, 1, 1])
    a = torch.randn(400, 3, dtype=torch.float64)
    b = a * deviation + mean  # its covariance is D S D, and (S D S D)^1/2 is S D only where S is diagonal
    whitened = torch.linalg.solve(torch.linalg.cholesky(torch.cov(a.T)), (a - a.mean(0)).T).T
    assert metrics.frechet_distance(whitened, whitened) == pytest.approx(0, abs=1e-9)
    # Of diagonal covariances 1 and d^2: |m|^2 + sum (1 - d)^2 = 1 + 1.
    assert metrics.frechet_distance(whitened, whitened * deviation + mean) == pytest.approx(2)
    # In general the trace of the root of the product, here by its eigenvalues.
    S, T = torch.cov(a.T), torch.cov(b.T)
    cross = torch.linalg.eigvals(S @ T).real.sqrt().sum()
    expected = (a.mean(0) - b.mean(0)).square().sum() + S.trace() + T.trace() - 2 * cross
    assert metrics.frechet_distance(a, b) == pytest.approx(expected.item())


def test_class_score() -> None:
    sure = torch.eye(4).repeat(5, 1)  # each image one class, all classes alike
    assert metrics.class_score(sure) == pytest.approx(4)
    assert metrics.class_score(torch.full((10, 4), 0.25)) == pytest.approx(1)
