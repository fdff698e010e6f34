"""Training on real data: the spectrum of every regularised layer tightens and the network gets no worse."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("sklearn")

import digits_ways as ways
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


def made_up(job: ways.Job) -> list[Outcome]:
    """Best at rate 0.1 or 0.01, weight 0.03 or 0.3; the projection reaches smaller ratios."""
    one = job.settings
    rate = abs(one.rate - {"sgd": 0.1, "adamw": 0.01}[one.optimizer])
    weight = abs(one.weight - (0.3 if one.way == "projection" else 0.03)) if one.weight else 0.5
    ratio = 9.0 if not one.weight else 3.0 if one.way == "penalty" else 2.0
    return [Outcome(0.9 - 0.01 * rate - 0.01 * weight + 0.001 * fold, {"down": ratio, "widen": 4.0}) for fold in (0, 1)]


def test_protocol_chooses_runs_once_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[ways.Job] = []

    def perform(job: ways.Job) -> list[Outcome]:
        done.append(job)
        if len(done) == 100:
            raise KeyboardInterrupt
        return made_up(job)

    monkeypatch.setattr(ways, "perform", perform)
    path = tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ways.follow_protocol(ways.Results(path), processes=1)
    assert len(path.read_text().splitlines()) == 99
    results = ways.Results(path)
    ways.follow_protocol(results, processes=1)
    assert len(done) == len(set(done)) + 1  # the one that was interrupted
    assert ways.Results(path).outcomes == results.outcomes
    assert ways.rates(results, "sgd") == (0.1, 0.2)
    assert [(one.way, one.weight) for one in ways.chosen(results, "adamw")] == 2 * [
        ("penalty", 0.0), ("penalty", 0.03), ("free", 0.03), ("projection", 0.3),
    ]  # fmt: skip
    fresh = [job for job in done if not job.choosing]
    assert len(fresh) == 2 * 8 * ways.SEEDS
    printed = ways.final_table(results)
    assert "| rate 0.1, lambda 0.03 | 90.05 | +0.50 ± 0.00 | 10, 0 | 3 | 4 |" in printed
    assert "| projection | AdamW, rate 0.01, projection 0.1 | 89.85 | 2 | 4 |" in ways.equal_accuracy_table(results)
    assert len(ways.choosing_table(results).splitlines()) == 2 + 4 + 5  # twice 0.01 is a rate of its own
