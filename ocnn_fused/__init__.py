"""Orthogonality loss of convolutions and its gradient, fused and exact."""

from . import reference
from ._version import __version__
from .functional import fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss
from .tune import tune

__all__ = ["__version__", "fused_orth_loss", "fused_orth_loss_foreach", "kernel_orth_loss", "reference", "tune"]
