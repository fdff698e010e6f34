"""The Lightning callback against a loop written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("lightning")

from frameworks import images_in_order, lightning_module, lightning_trainer, train_lightning
from problem import IMAGES, LEAST_DIGITS_LOSS, OPTIONS, STEPS, assert_same, by_hand

from ocnn_fused import OrthRegularizer
from ocnn_fused.integrations.lightning import OrthCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers, loggers and logging intervals

BATCH = IMAGES // STEPS


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_weights_are_those_of_the_loop(accumulate: int, clip: float | None) -> None:
    weights = train_lightning(accumulate=accumulate, gradient_clip_val=clip)
    assert_same(weights, by_hand(clip))


def test_a_scaler_unscales_the_gradient() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weights = train_lightning(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], precision=None)
    assert_same(weights, by_hand(), rtol=0, atol=3e-3)  # the task's loss is in half precision
    assert scaler.get_scale() == 2.0**10  # no step was skipped


def test_logged_values_are_the_unweighted_losses() -> None:
    module, callback = lightning_module(), OrthCallback(**OPTIONS, log_layers=True)
    trainer = lightning_trainer(callbacks=[callback], log_every_n_steps=1)
    trainer.fit(module, images_in_order(BATCH))
    losses = OrthRegularizer(module).per_layer()
    logged = {name: value.item() for name, value in trainer.logged_metrics.items()}
    assert logged == pytest.approx(
        {"orth/loss": sum(losses.values()).item(), **{f"orth/{name}": loss.item() for name, loss in losses.items()}}
    )


def test_a_checkpoint_holds_the_step_count(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    trainer = lightning_trainer(callbacks=[OrthCallback(**OPTIONS)], max_steps=2)
    trainer.fit(lightning_module(task=0.0), images_in_order(BATCH))  # Lightning starts the epoch's data anew
    trainer.save_checkpoint(path)
    callback = OrthCallback(**OPTIONS)
    module = lightning_module(task=0.0)
    lightning_trainer(callbacks=[callback]).fit(module, images_in_order(BATCH), ckpt_path=path)
    assert callback.regularizer.steps == STEPS
    torch.testing.assert_close(module.net.state_dict(), by_hand(task=0.0))


def test_the_same_callback_serves_twice() -> None:
    callback = OrthCallback(**OPTIONS)
    for _ in range(2):
        lightning_trainer(callbacks=[callback]).fit(lightning_module(), images_in_order(BATCH))
        assert callback.regularizer.steps == STEPS


def test_manual_optimisation_is_refused() -> None:
    module = lightning_module()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="needs automatic optimisation"):
        lightning_trainer(callbacks=[OrthCallback()]).fit(module, images_in_order(BATCH))


def test_regularizer_is_not_there_before_fit() -> None:
    with pytest.raises(RuntimeError, match=r"from the start of Trainer\.fit on"):
        _ = OrthCallback().regularizer


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from lightning_training import main

    metrics = main(["--epochs", "3"])
    assert metrics["accuracy"] > 0.6
    assert LEAST_DIGITS_LOSS < metrics["orth/loss"] < LEAST_DIGITS_LOSS + 10  # 80 at the start
    assert "net.widen" in capsys.readouterr().out
