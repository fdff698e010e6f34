"""An optimiser whose updates are orthogonal: as convolutions, at every stride, or as matrices."""

from .coefficients import largest, minimax
from .muon import Muon
from .update import orthogonal_update, promised_norm

__all__ = ["Muon", "largest", "minimax", "orthogonal_update", "promised_norm"]
