"""The Trainer mixin against a loop written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from frameworks import train_transformers, transformers_trainer
from problem import LEAST_DIGITS_LOSS, STEPS, assert_same, by_hand

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_weights_are_those_of_the_loop(accumulate: int, clip: float, tmp_path: Path) -> None:
    weights = train_transformers(str(tmp_path), accumulate=accumulate, max_grad_norm=clip)
    assert_same(weights, by_hand(clip))


def test_a_scaler_unscales_the_gradient(tmp_path: Path) -> None:
    trainer = transformers_trainer(str(tmp_path))
    # Accelerate makes one on GPUs only; what it does with it is the same here.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**10
    assert_same(trainer.model.net.state_dict(), by_hand())


def test_logged_values_are_the_unweighted_losses(tmp_path: Path) -> None:
    trainer = transformers_trainer(str(tmp_path), logging_steps=1, orth_log_layers=True)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = {f"orth/{name}": loss.item() for name, loss in trainer.orth.per_layer().items()}
    assert len(logged) == STEPS
    assert {name: logged[-1][name] for name in losses} == pytest.approx(losses)
    assert logged[-1]["orth/loss"] == pytest.approx(sum(losses.values()))
    assert logged[-1]["orth/loss"] < logged[0]["orth/loss"]


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    transformers_trainer(str(tmp_path), max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = transformers_trainer(str(tmp_path))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert_same(trainer.model.net.state_dict(), by_hand())


def test_example() -> None:
    pytest.importorskip("sklearn")
    from transformers_training import main

    history = main(["--epochs", "4", "--weight", "0.1"])
    losses = [entry["orth/loss"] - LEAST_DIGITS_LOSS for entry in history if "orth/loss" in entry]
    assert losses[-1] < losses[0] / 2
    assert max(entry.get("eval_accuracy", 0.0) for entry in history) > 0.6
