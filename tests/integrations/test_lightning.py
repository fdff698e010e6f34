"""The Lightning callback against a loop written by hand."""

from __future__ import annotations

from functools import partialmethod
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


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_scaler_does_not_change_the_gradient(clip: float | None) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    weights = train_lightning(plugins=[plugin], precision=None, gradient_clip_val=clip)
    assert_same(weights, by_hand(clip), rtol=0, atol=3e-3)  # the task's loss is in half precision
    assert scaler.get_scale() == 2.0**10  # no step was skipped


def test_an_optimizer_that_unscales_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused one gets the gradients as they are, and the scale."""
    from lightning.pytorch.plugins import MixedPrecision

    monkeypatch.setattr("torch.optim.SGD.__init__", partialmethod(torch.optim.SGD.__init__, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    weights = train_lightning(plugins=[MixedPrecision("16-mixed", "cpu", scaler)], precision=None)
    assert_same(weights, by_hand(), rtol=0, atol=3e-3)


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


def test_a_loaded_state_is_used_once(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    trainer = lightning_trainer(callbacks=[OrthCallback(**OPTIONS)], max_steps=2)
    trainer.fit(lightning_module(), images_in_order(BATCH))
    trainer.save_checkpoint(path)
    callback = OrthCallback(**OPTIONS)
    for checkpoint in (path, None, path):
        lightning_trainer(callbacks=[callback]).fit(lightning_module(), images_in_order(BATCH), ckpt_path=checkpoint)
        assert callback.regularizer.steps == STEPS


def test_a_batch_without_a_loss() -> None:
    """No backward, and nothing to regularise."""
    module, expected = lightning_module(), lightning_module().net.state_dict()
    module.training_step = lambda batch, batch_idx: None
    lightning_trainer(callbacks=[OrthCallback(**OPTIONS)]).fit(module, images_in_order(BATCH))
    torch.testing.assert_close(module.net.state_dict(), expected, rtol=0, atol=0)


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

    metrics = main(["--epochs", "3", "--weight", "0.1"])
    assert metrics["accuracy"] > 0.6
    assert LEAST_DIGITS_LOSS < metrics["orth/loss"] < LEAST_DIGITS_LOSS + 10  # 80 at the start
    assert "net.widen" in capsys.readouterr().out
