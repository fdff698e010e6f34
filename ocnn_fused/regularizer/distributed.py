"""Who computes what when several processes train one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..modules import wrappers

Shard = bool | Literal["auto"]


def balanced_shares(costs: Sequence[float], world: int) -> list[tuple[int, ...]]:
    """Indices of ``costs`` for each of ``world`` ranks: the most expensive first, each to the rank with least so far.

    Deterministic, so that every rank finds the same shares without a word exchanged.
    """
    shares: list[list[int]] = [[] for _ in range(world)]
    loads = [0.0] * world
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [tuple(sorted(share)) for share in shares]


def sharing_group(model: nn.Module, shard: Shard) -> dist.ProcessGroup | None:
    """The processes whose gradients are averaged, or None where each computes everything.

    ``"auto"`` takes DistributedDataParallel's group and nothing else: without that wrapper nobody is known to average.
    True takes the default group as well.
    """
    if shard is False or not dist.is_available() or not dist.is_initialized():
        return None
    parallel = _data_parallel(model)
    if parallel is not None:
        return parallel.process_group
    return dist.group.WORLD if shard is True else None


def is_data_parallel(model: nn.Module) -> bool:
    """Whether the model is wrapped in DistributedDataParallel."""
    return _data_parallel(model) is not None


def averages_everything(model: nn.Module) -> bool:
    """Whether every gradient that is there before the backward is averaged in it.

    DistributedDataParallel leaves alone what no rank's forward pass used if it was told that there may be such layers
    (by default it insists that there are none).
    """
    parallel = _data_parallel(model)
    return parallel is None or not (parallel.find_unused_parameters or parallel.static_graph)


def announce(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The same loss with ``weights`` in its graph, though it has no gradient for them.

    DistributedDataParallel waits on every rank for every weight; one that the forward pass does not use is announced to
    it by the loss alone.
    """
    return _Announce.apply(loss, *weights) if weights else loss


class _Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.count = len(weights)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, *(None,) * ctx.count


def _data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    for module in wrappers(model):
        if isinstance(module, DistributedDataParallel):
            return module
    return None


def under_fully_shard(model: nn.Module) -> frozenset[nn.Module]:
    """Modules whose parameters ``fully_shard`` manages; where nobody imported it there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    return frozenset(part for module in model.modules() if isinstance(module, kind) for part in module.modules())


#: What sending costs: a message, and bytes per second between processes of one machine.
_MESSAGE_SECONDS = 50e-6
_LINK = 5e9


def sharing_pays(seconds: float, nbytes: int, world: int) -> bool:
    """Whether ranks that share work of so many seconds, and send each other its results, are done sooner."""
    saved = seconds * (1 - 1 / world)
    return saved > world * _MESSAGE_SECONDS + nbytes / _LINK


def send_shares(group: dist.ProcessGroup, shares: Sequence[Sequence[Tensor]]) -> None:
    """Make the tensors of all ranks equal to those of the rank whose share they are: one message per rank and dtype."""
    messages = []
    for source, share in enumerate(shares):
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in share:
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for tensors in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            sent = dist.broadcast(flat, dist.get_global_rank(group, source), group, async_op=True)
            messages.append((source, tensors, flat, sent))
    for source, tensors, flat, sent in messages:
        sent.wait()
        if source == group.rank():
            continue
        for tensor, values in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def mean_over(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    """Average of a tensor over the processes of ``group``; a collective that all of them must call."""
    if group is None or group.size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / group.size()
