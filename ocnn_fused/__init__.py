"""Orthogonality loss of convolutions and its gradient, fused and exact."""

from . import init, optim, reference
from ._version import __version__
from .functional import explain, fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss, tune
from .projection import orthogonalize_
from .regularizer import OrthRegularizer, schedules, srip_loss

__all__ = [
    "OrthRegularizer",
    "__version__",
    "explain",
    "fused_orth_loss",
    "fused_orth_loss_foreach",
    "init",
    "kernel_orth_loss",
    "optim",
    "orthogonalize_",
    "reference",
    "schedules",
    "srip_loss",
    "tune",
]
