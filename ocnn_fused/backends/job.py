"""What a backend is given for one weight, and what it gives back for a list of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..plan import AnyPlan, Plan
from ..problem import Precision, Problem
from .device import beside_all_graphs
from .epilogue import Epilogue, apply_epilogue


class Operand(NamedTuple):
    """How one weight lies in memory, and whether its gradient is wanted."""

    strides: tuple[int, ...]
    dtype: torch.dtype
    with_grad: bool


PlanT = TypeVar("PlanT", bound=AnyPlan, covariant=True)


@dataclass(frozen=True)
class Job(Generic[PlanT]):
    """One weight of a call: its loss, the plan for it, the memory, and how float32 products are computed."""

    problem: Problem
    plan: PlanT
    operand: Operand
    precision: Precision = "ieee"


#: The losses of a list of weights, 1-D, in the widest of their accumulation dtypes; and a gradient for each weight, in
#: its own dtype, empty where none is wanted.
LossesAndGrads = tuple[Tensor, list[Tensor]]


class Executable(Protocol):
    """Executes the plans of a list of weights; the results have no graph.

    An epilogue with targets adds the gradients to them: ignore the returned list then.
    """

    def __call__(self, weights: Sequence[Tensor], epilogue: Epilogue | None = None, /) -> LossesAndGrads: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a weight is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def losses_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """What the losses of weights of these dtypes are returned in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_bilinear(plan: AnyPlan, dtype: torch.dtype) -> bool:
    """Whether a plan is made of planes and products: all that most backends take."""
    return isinstance(plan, Plan)


class Executor(Protocol):
    """A plan with its matrices on a device, in PyTorch calls."""

    @property
    def plan(self) -> AnyPlan: ...

    def __call__(self, weight: Tensor, with_grad: bool) -> tuple[Tensor, Tensor]:
        """Loss and gradient, which is empty if none is wanted."""


def prepare_each(
    jobs: Sequence[Job[PlanT]], device: torch.device, make: Callable[[PlanT, torch.dtype, torch.device], Executor]
) -> Executable:
    """Executors of all plans among the jobs; jobs that are alike share one."""
    keys = {(job.plan, job.operand.dtype) for job in jobs}
    executors = beside_all_graphs(device, lambda: {key: make(*key, device) for key in keys})
    dtype = losses_dtype([job.operand.dtype for job in jobs])
    return partial(_run_each, [(executors[job.plan, job.operand.dtype], job.operand.with_grad) for job in jobs], dtype)


@torch.no_grad()
def _run_each(
    calls: Sequence[tuple[Executor, bool]],
    dtype: torch.dtype,
    weights: Sequence[Tensor],
    epilogue: Epilogue | None = None,
) -> LossesAndGrads:
    """Losses and gradients, one weight after the other; autocast would round the products."""
    losses, grads = [], []
    with torch.autocast(weights[0].device.type, enabled=False):
        for place, ((executor, with_grad), weight) in enumerate(zip(calls, weights, strict=True)):
            loss, grad = executor(weight, with_grad)
            losses.append(loss.to(dtype))
            if epilogue is not None and with_grad:
                grad = apply_epilogue(epilogue, place, weight, grad, executor.plan.groups)
            grads.append(grad)
        return torch.stack(losses), grads


def joined(parts: Sequence[tuple[Sequence[int], Executable]], device: torch.device) -> Executable:
    """What executes all weights of a call, if each part executes those at its places."""
    used = [part for part in parts if part[0]]
    if len(used) == 1:
        return used[0][1]
    place_of = [place for places, _ in used for place in places]  # of each loss, one part after the other
    order = sorted(range(len(place_of)), key=place_of.__getitem__)
    positions = beside_all_graphs(device, lambda: torch.tensor(order, device=device))
    return partial(_run_parts, used, positions)


@torch.no_grad()
def _run_parts(
    parts: Sequence[tuple[Sequence[int], Executable]],
    positions: Tensor,
    weights: Sequence[Tensor],
    epilogue: Epilogue | None = None,
) -> LossesAndGrads:
    """Results of all parts in the order of the weights, which is that of ``positions`` in the parts' losses."""
    losses, grads = [], list(weights)
    for places, execute in parts:
        own = None if epilogue is None else epilogue.of(places)
        some_losses, some_grads = execute([weights[place] for place in places], own)
        losses.append(some_losses)
        for place, grad in zip(places, some_grads, strict=False):
            grads[place] = grad
    return torch.cat(losses)[positions], grads
