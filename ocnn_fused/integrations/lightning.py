"""A Lightning callback: ``Trainer(callbacks=[OrthCallback(weight=0.01)])``, and the module stays as it is."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy
except ImportError as error:
    raise ImportError(
        "ocnn_fused.integrations.lightning needs lightning: pip install 'ocnn-fused[lightning]'"
    ) from error

import torch
from torch import Tensor

from ..regularizer import OrthRegularizer, Weight, is_data_parallel
from .common import gradient_scale, log_values

__all__ = ["OrthCallback"]


class OrthCallback(Callback):
    """Trains with the orthogonality loss of the module's convolutions; automatic optimisation only.

    A callback cannot return another loss, so the gradient is put into ``.grad``: once per optimiser step, however many
    batches are accumulated, after a GradScaler has unscaled and before gradients are clipped. DistributedDataParallel
    gets it before the first backward instead and averages it, so each rank computes its share of the layers only. The
    loss that the module logs stays the task's own.

    Args:
        weight: lambda, as for :class:`OrthRegularizer`.
        log: log ``orth/loss``, the sum of the unweighted losses, every ``log_every_n_steps`` of the Trainer.
        log_layers: log each layer's as ``orth/<layer>`` too.
        **options: anything else that :class:`OrthRegularizer` takes. Names are those of the LightningModule's layers.

    The callback's state in a checkpoint is the regulariser's: schedules, and lambdas that are steered, go on where they
    were.
    """

    def __init__(self, weight: Weight = 0.01, *, log: bool = True, log_layers: bool = False, **options: Any) -> None:
        self.log = log or log_layers
        self.log_layers = log_layers
        self._options = {"weight": weight, **options}
        self._reg: OrthRegularizer | None = None
        self._saved: dict[str, Any] | None = None  # state that came before the regulariser
        self._counter: Any = None
        self._averaged = False
        self._due = True  # no backward since the last step of the optimiser

    @property
    def regularizer(self) -> OrthRegularizer:
        """The regulariser, from the start of ``fit`` on."""
        if self._reg is None:
            raise RuntimeError("OrthCallback has its regularizer from the start of Trainer.fit on, not before")
        return self._reg

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                "OrthCallback needs automatic optimisation; with manual optimisation add an OrthRegularizer's value to "
                "the loss before manual_backward()"
            )
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError("OrthCallback adds to .grad, which DeepSpeed does not use; use another strategy")
        # The strategy's model shows whether DistributedDataParallel averages the gradients.
        self._reg = OrthRegularizer(trainer.strategy.model, **self._options)
        if self._saved is not None:
            self._reg.load_state_dict(self._saved)
        self._averaged = is_data_parallel(trainer.strategy.model)
        self._counter = self._reg.attach(trainer.optimizers[0])
        self._due = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._averaged and self._due:
            self.regularizer.add_grad_(gradient_scale(_scaler(trainer), loss.device), shard=True)
        self._due = False

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._averaged and not self._due:
            # Unscaled by now, unless the optimiser does that itself.
            scaler = _scaler(trainer) if getattr(optimizer, "_step_supports_amp_scaling", False) else None
            self.regularizer.add_grad_(gradient_scale(scaler, pl_module.device))
        self._due = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, stepped = trainer.log_every_n_steps, self._due
        if self.log and stepped and every and trainer.global_step % every == 0:
            pl_module.log_dict(log_values(self.regularizer, self.log_layers))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._saved = None  # the next fit starts anew, unless it restores a checkpoint itself
        if self._counter is not None:
            self._counter.remove()
            self._counter = None

    def state_dict(self) -> dict[str, Any]:
        return self._reg.state_dict() if self._reg is not None else self._saved or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Some strategies restore before the start of fit, others after it; a regulariser may be left from another fit.
        self._saved = state_dict or None
        if self._reg is not None and state_dict:
            self._reg.load_state_dict(state_dict)


def _scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)
