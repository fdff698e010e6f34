"""The ops that ``torch.compile`` sees: weights and flattened problems in, one 0-dim loss per weight out.

``ocnn_fused::orth_loss`` is what the public functions call; ``ocnn_fused::orth_loss_and_grad`` also returns the
gradients of the weights marked in ``with_grad`` (empty tensors for the others); ``ocnn_fused::orth_grad`` returns such
gradients as they are, and makes them functions of the weights. Their derivatives are in autograd.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import engine
from .backends.job import accumulation_dtype
from .problem import PROBLEMS_SCHEMA, SCHEMA, Flat, FlatProblems, unflatten

if TYPE_CHECKING:
    from typing_extensions import Unpack

Lists: TypeAlias = "tuple[list[Tensor], list[Tensor]]"

# torch.compile's own CUDA graphs leave the ops out, whose outputs share memory; graphs that the user captures are not
# affected. Older torch has no such tag and captures them: there every output gets memory of its own.
_LEFT_OUT = hasattr(torch.Tag, "cudagraph_unsafe")
_TAGS = [torch.Tag.cudagraph_unsafe] if _LEFT_OUT else []

library = torch.library.Library("ocnn_fused", "FRAGMENT")
library.define(f"orth_loss(Tensor[] weights, {SCHEMA}) -> Tensor[]", tags=_TAGS)
library.define(f"orth_loss_and_grad(Tensor[] weights, bool[] with_grad, {SCHEMA}) -> (Tensor[], Tensor[])", tags=_TAGS)
library.define(f"orth_grad(Tensor[] weights, Tensor[] grads, {PROBLEMS_SCHEMA}) -> Tensor[]")


def _apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each with a storage of its own, as the outputs of an op must be: a backend may return pieces of one buffer."""
    apart = (lambda one: from_dlpack(to_dlpack(one))) if _LEFT_OUT else torch.clone
    return [apart(one) if one.untyped_storage().nbytes() > one.nbytes else one for one in tensors]


def _orth_loss_and_grad(weights: Sequence[Tensor], with_grad: Sequence[bool], *flat: Unpack[Flat]) -> Lists:
    problems, options = unflatten(weights, *flat)
    losses, grads = engine.losses_and_grads(weights, problems, options, with_grad)
    return _apart(losses), _apart(grads)


def _orth_loss(weights: Sequence[Tensor], *flat: Unpack[Flat]) -> list[Tensor]:
    return _orth_loss_and_grad(weights, [False] * len(weights), *flat)[0]


def _orth_grad(weights: Sequence[Tensor], grads: Sequence[Tensor], *flat: Unpack[FlatProblems]) -> list[Tensor]:
    return [grad.clone() for grad in grads]


library.impl("orth_loss", _orth_loss, "CompositeExplicitAutograd")
library.impl("orth_loss_and_grad", _orth_loss_and_grad, "CompositeExplicitAutograd")
library.impl("orth_grad", _orth_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("ocnn_fused::orth_loss", lib=library)
def _orth_loss_fake(weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [weight.new_empty((), dtype=accumulation_dtype(weight.dtype)) for weight in weights]


@torch.library.register_fake("ocnn_fused::orth_loss_and_grad", lib=library)
def _orth_loss_and_grad_fake(weights: Sequence[Tensor], with_grad: Sequence[bool], *_: object) -> Lists:
    return _orth_loss_fake(weights), [
        torch.empty_like(weight) if wanted else weight.new_empty(0)
        for weight, wanted in zip(weights, with_grad, strict=True)
    ]


@torch.library.register_fake("ocnn_fused::orth_grad", lib=library)
def _orth_grad_fake(weights: Sequence[Tensor], grads: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in grads]


# Under autocast the loss stays in float32, as PyTorch's own losses do.
for _device_type in ("cpu", "cuda"):
    torch.library.register_autocast("ocnn_fused::orth_loss", _device_type, torch.float32, lib=library)
