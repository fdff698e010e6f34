"""Orthogonality loss of convolutions and its gradient, fused and exact."""

from . import reference, schedules
from ._version import __version__
from .functional import fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss
from .regularizer import OrthRegularizer
from .srip import srip_loss
from .tune import tune

__all__ = [
    "OrthRegularizer",
    "__version__",
    "fused_orth_loss",
    "fused_orth_loss_foreach",
    "kernel_orth_loss",
    "reference",
    "schedules",
    "srip_loss",
    "tune",
]
