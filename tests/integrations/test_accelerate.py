"""The loop that docs and example show for Accelerate."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")

from frameworks import train_accelerate
from problem import LEAST_DIGITS_LOSS, assert_same, by_hand


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_those_of_the_loop(accumulate: int) -> None:
    assert_same(train_accelerate(accumulate=accumulate), by_hand())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_prepared_optimizer_counts(accumulate: int) -> None:
    assert_same(train_accelerate(accumulate=accumulate, attach=True), by_hand())


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from accelerate_training import main

    assert main(["--epochs", "3", "--accumulate", "2", "--weight", "0.1"]) > 0.6
    printed = capsys.readouterr().out
    losses = [float(line.split()[2]) - LEAST_DIGITS_LOSS for line in printed.splitlines() if line.startswith("epoch")]
    assert losses[-1] < losses[0] / 2
