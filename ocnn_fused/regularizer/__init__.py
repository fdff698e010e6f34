"""What is about models: their layers, and the loss of all of them in a training loop."""

from . import schedules
from .distributed import is_data_parallel
from .regularizer import OrthRegularizer
from .settings import Weight
from .srip import srip_loss

__all__ = ["OrthRegularizer", "Weight", "is_data_parallel", "schedules", "srip_loss"]
