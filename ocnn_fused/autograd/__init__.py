"""How the losses are differentiated: one node for a list of weights (node.py), on every backend.

The gradient is computed together with the loss. Where more than autograd looks at the tensors, a transform of
``torch.func``, ``torch.compile`` or a subclass, the ops of ops.py are called, whose derivatives are in transforms.py.
"""

from .node import Weighting, add_grads_, orth_loss, orth_losses, orth_total

__all__ = ["Weighting", "add_grads_", "orth_loss", "orth_losses", "orth_total"]
