"""Training on real data: the spectrum of every regularised layer tightens and the network gets no worse."""

from __future__ import annotations

from statistics import mean

import pytest

pytest.importorskip("sklearn")

from digits import Outcome, Settings, table, train


@pytest.mark.slow
def test_spectrum_tightens_and_accuracy_does_not_fall() -> None:
    """The first folds of the documented run, where the least factor of all folds is 4.1."""
    plain, regularised = (
        [train(Settings(0.1, weight), seed=0, fold=fold) for fold in range(4)] for weight in (0.0, 0.01)
    )
    assert regularised[0].condition.keys() == {"down", "widen", "narrow"}
    for fold, (before, after) in enumerate(zip(plain, regularised, strict=True)):
        for name, condition in after.condition.items():
            assert condition < before.condition[name] / 3.5, (fold, name)
    accuracies = [mean(outcome.accuracy for outcome in outcomes) for outcomes in (plain, regularised)]
    assert accuracies[0] > 0.9  # from 120 images
    assert accuracies[1] >= accuracies[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("way", ["penalty", "free", "projection"])
def test_every_way_tightens_the_spectrum(way: str, optimizer: str) -> None:
    settings = Settings(0.1 if optimizer == "sgd" else 0.003, 0.1, way, optimizer)
    plain, regularised = (train(one, seed=100, fold=0, epochs=4, choosing=True) for one in (settings.plain, settings))
    assert all(regularised.condition[name] < plain.condition[name] for name in plain.condition)
    assert str(settings) != str(settings.plain)


def test_table() -> None:
    plain = [Outcome(0.9, {"layer": 8.0}), Outcome(0.8, {"layer": 4.0})]
    regularised = [Outcome(0.9, {"layer": 2.0}), Outcome(0.9, {"layer": 2.0})]
    printed = table({Settings(0.5, 0.0): plain, Settings(0.5, 0.1): regularised}, folds=1)
    assert "| rate 0.5, plain | rate 0.5, lambda 0.1 |" in printed
    assert "| layer: largest / smallest | 6.00 ± 2.83 | 2.00 ± 0.00 (at least 2.0x less) |" in printed
    assert "| test accuracy, % | 85.00 | 90.00 |" in printed
    assert "| difference to plain |  | +5.00 ± 5.00; 1 better, 0 worse |" in printed
    assert "| seed 1 | 80.00 | 90.00 |" in printed
