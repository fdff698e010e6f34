"""What the integrations share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..regularizer import OrthRegularizer


def gradient_scale(scaler: torch.amp.GradScaler | None, device: torch.device) -> float | Tensor:
    """What a GradScaler multiplies losses by, as a tensor: ``get_scale()`` would wait for the device."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    return scaler.scale(torch.ones((), device=device))


def log_values(reg: OrthRegularizer, per_layer: bool) -> dict[str, Tensor]:
    """Unweighted losses for a logger: their sum as ``orth/loss`` and, if asked for, each as ``orth/<layer>``."""
    losses = reg.per_layer()
    values = {f"orth/{name}": loss for name, loss in losses.items()} if per_layer else {}
    # Layers may differ in device and dtype.
    total = [loss.to(next(iter(losses.values()))) for loss in losses.values()]
    values["orth/loss"] = torch.stack(total).sum() if total else torch.zeros(())
    return values
