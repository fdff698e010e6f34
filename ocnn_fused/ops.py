"""The ops that ``torch.compile`` sees: weights and flattened problems in, one tensor of losses out.

``orth_loss`` is what the public functions call; ``orth_loss_and_grad`` also returns the gradients of the weights marked
in ``with_grad`` (empty tensors for the others); ``orth_grad`` returns such gradients as they are, and makes them
functions of the weights. Their derivatives are in autograd/transforms.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import engine
from .backends.job import losses_dtype
from .problem import PROBLEMS_SCHEMA, SCHEMA, Flat, FlatProblems, unflatten

if TYPE_CHECKING:
    from typing_extensions import Unpack

LossesAndGrads: TypeAlias = "tuple[Tensor, list[Tensor]]"

# torch.compile's own CUDA graphs leave the ops out, whose outputs share memory; graphs that the user captures are not
# affected.
_TAGS = [torch.Tag.cudagraph_unsafe]

library = torch.library.Library("ocnn_fused", "FRAGMENT")
library.define(f"orth_loss(Tensor[] weights, {SCHEMA}) -> Tensor", tags=_TAGS)
library.define(f"orth_loss_and_grad(Tensor[] weights, bool[] with_grad, {SCHEMA}) -> (Tensor, Tensor[])", tags=_TAGS)
library.define(f"orth_grad(Tensor[] weights, Tensor[] grads, {PROBLEMS_SCHEMA}) -> Tensor[]")

orth_loss = torch.ops.ocnn_fused.orth_loss.default
orth_loss_and_grad = torch.ops.ocnn_fused.orth_loss_and_grad.default
orth_grad = torch.ops.ocnn_fused.orth_grad.default


def _apart(tensor: Tensor) -> Tensor:
    """With a storage of its own, as the outputs of an op must have: a backend may return pieces of one buffer."""
    return from_dlpack(to_dlpack(tensor)) if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _orth_loss_and_grad(weights: Sequence[Tensor], with_grad: Sequence[bool], *flat: Unpack[Flat]) -> LossesAndGrads:
    problems, options = unflatten(weights, *flat)
    losses, grads = engine.losses_and_grads(weights, problems, options, with_grad)
    return losses, list(map(_apart, grads))


def _orth_loss(weights: Sequence[Tensor], *flat: Unpack[Flat]) -> Tensor:
    return _orth_loss_and_grad(weights, [False] * len(weights), *flat)[0]


def _orth_grad(weights: Sequence[Tensor], grads: Sequence[Tensor], *flat: Unpack[FlatProblems]) -> list[Tensor]:
    return [grad.clone() for grad in grads]


library.impl("orth_loss", _orth_loss, "CompositeExplicitAutograd")
library.impl("orth_loss_and_grad", _orth_loss_and_grad, "CompositeExplicitAutograd")
library.impl("orth_grad", _orth_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("ocnn_fused::orth_loss", lib=library)
def _orth_loss_fake(weights: Sequence[Tensor], *_: object) -> Tensor:
    return weights[0].new_empty(len(weights), dtype=losses_dtype([weight.dtype for weight in weights]))


@torch.library.register_fake("ocnn_fused::orth_loss_and_grad", lib=library)
def _orth_loss_and_grad_fake(weights: Sequence[Tensor], with_grad: Sequence[bool], *_: object) -> LossesAndGrads:
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
