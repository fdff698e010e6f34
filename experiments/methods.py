"""The methods that are compared, all through OrthRegularizer."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ocnn_fused import OrthRegularizer

Method = Literal["plain", "kernel", "srip", "ocnn", "ocnn-free", "projection", "ocnn-auto", "kernel-auto"]
ALL: tuple[Method, ...] = get_args(Method)
#: With a number that is chosen by trials.
METHODS = ALL[:6]
#: What every row of the table is run with; the other two come later.
COMPARED = METHODS[:4]
#: With a lambda for each layer that is steered to a tolerance.
STEERED = ALL[6:]


class Regularization:
    """What a method adds to a training step of a model.

    ``weight`` is lambda, for the projection its rate, for what is steered the tolerance. ``loss()`` is added to the
    task's loss, ``after_step()`` is called after the optimiser's step.
    """

    def __init__(self, method: Method, weight: float, model: nn.Module) -> None:
        if method not in ALL:
            raise ValueError(f"method must be one of {', '.join(ALL)}, got {method!r}")
        if (method == "plain") != (weight == 0):
            raise ValueError(f"weight must be 0 for the plain method and positive for the others, got {weight!r}")
        self.projection_rate = weight if method == "projection" else None
        self.regularizer = None if method == "plain" else _regularizer(model, method, weight)

    def loss(self) -> Tensor:
        """Lambda times the orthogonality losses; zero for the plain method and for the projection."""
        if self.regularizer is None or self.projection_rate is not None:
            return torch.zeros(())
        return self.regularizer()

    def after_step(self) -> None:
        if self.regularizer is not None and self.projection_rate is not None:
            # Every step checked: which ones are by default depends on the steps before, and no checkpoint has that.
            self.regularizer.project_(rate=self.projection_rate, safe="always")

    def state_dict(self) -> dict[str, Any]:
        """Of the regulariser, for a checkpoint."""
        return {} if self.regularizer is None else self.regularizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.regularizer is not None:
            self.regularizer.load_state_dict(state)


def _regularizer(model: nn.Module, method: Method, weight: float) -> OrthRegularizer:
    if method in STEERED:
        return OrthRegularizer(model, "auto", tolerance=weight, method="kernel" if method == "kernel-auto" else "conv")
    if method in ("kernel", "srip"):
        return OrthRegularizer(model, weight, method=method)  # type: ignore[arg-type]
    return OrthRegularizer(model, weight, target="free" if method == "ocnn-free" else 1)


@torch.no_grad()
def orthogonality_loss(model: nn.Module) -> float:
    """The paper's loss of all convolutions, above the least that their shapes allow, whatever method trained them."""
    return float(sum(OrthRegularizer(model, normalize="excess").per_layer().values()))
