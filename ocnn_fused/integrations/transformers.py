"""A Hugging Face Trainer with the regulariser: ``OrthTrainer(model, args, ..., orth={"weight": 0.01})``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "ocnn_fused.integrations.transformers needs transformers and accelerate: pip install 'ocnn-fused[transformers]'"
    ) from error

from torch import Tensor, nn

from ..regularizer import OrthRegularizer
from .common import gradient_scale, log_values

__all__ = ["OrthTrainer", "OrthTrainerMixin"]


class OrthTrainerMixin:
    """Adds the orthogonality loss to any Trainer: ``class MyTrainer(OrthTrainerMixin, Seq2SeqTrainer): ...``.

    Whether Trainer divides a loss by the number of accumulated batches depends on the model, so the loss is left alone
    and the gradient is put into ``.grad`` before the one backward of each optimiser step that synchronises: computed
    once per step, averaged by DistributedDataParallel (each rank computes its share of the layers, unless DDP looks for
    unused ones: ``ddp_find_unused_parameters=False``), unscaled by a GradScaler, seen by gradient clipping.

    Args:
        orth: what :class:`OrthRegularizer` takes besides the model, for instance ``{"weight": 0.01}``.
        orth_log_layers: log each layer's loss as ``orth/<layer>``, besides their sum ``orth/loss``.

    Schedules and ``every`` go by the Trainer's own step count, which it saves and restores. Lambdas that are steered
    (``"weight": "auto"``) begin anew in a training that is resumed.
    """

    def __init__(
        self, *args: Any, orth: Mapping[str, Any] | None = None, orth_log_layers: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.orth = OrthRegularizer(self.model, **(orth or {}))  # type: ignore[attr-defined]
        self.orth_log_layers = orth_log_layers
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            raise ValueError("OrthTrainerMixin adds to .grad, which DeepSpeed does not use; train without it")

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self._add_gradient(model)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def _add_gradient(self, model: nn.Module) -> None:
        if self.orth.model is not model:  # wrapped, or made anew by model_init
            self.orth.model = model
        self.orth.load_state_dict({"steps": self.state.global_step, "schedule": None})  # type: ignore[attr-defined]
        scaler = self.accelerator.scaler  # type: ignore[attr-defined]
        self.orth.add_grad_(gradient_scale(scaler, self.args.device), shard=True)  # type: ignore[attr-defined]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # of training, not of evaluation
            values = log_values(self.orth, self.orth_log_layers)
            logs.update({name: value.item() for name, value in values.items()})
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class OrthTrainer(OrthTrainerMixin, Trainer):
    """Trainer with the orthogonality loss, see :class:`OrthTrainerMixin`."""
