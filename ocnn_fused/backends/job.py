"""What a backend is given for one weight, and what it gives back for a list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..plan import AnyPlan, Plan
from ..problem import Precision, Problem
from .device import beside_all_graphs


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


class Epilogue(NamedTuple):
    """What becomes of the gradients of a call: ``factor * factors[l] * gradient`` is returned, or added to targets.

    No number of it is compiled or kept: it may be another one at every call.
    """

    factors: Tensor  # float64, one per weight, where the weights are
    factor: float = 1.0
    targets: Sequence[Tensor] = ()  # one per weight, or none; may be the weights themselves
    per_target: bool = False  # divided by the free target of each group, unless that is zero

    def of(self, places: Sequence[int]) -> Epilogue:
        """For some of the weights."""
        begin, end = places[0], places[-1] + 1
        if end - begin == len(places):
            factors = self.factors[begin:end]
        else:  # not indexed by a list, which would have to be copied to the device
            factors = torch.stack([self.factors[place] for place in places])
        targets = [self.targets[place] for place in places] if self.targets else ()
        return Epilogue(factors, self.factor, targets, self.per_target)

    def settle(self, place: int, weight: Tensor, grad: Tensor, groups: int) -> Tensor:
        """What a backend without an epilogue of its own returns for one weight, whose ``grad`` is its own to change."""
        factor = self.factors[place] * self.factor
        if self.per_target:
            kernel = weight.unflatten(0, (groups, -1))
            free = torch.linalg.vector_norm(kernel.double(), dim=tuple(range(1, kernel.dim())), keepdim=True).square()
            free /= kernel.shape[1]
            grad.unflatten(0, (groups, -1)).div_(torch.where(free > 0, free, 1.0).to(grad.dtype))
        if not self.targets:
            return grad.mul_(factor)
        self.targets[place].addcmul_(grad, factor.to(grad.dtype))
        return grad.new_empty(0)


class Executable(Protocol):
    """Executes the plans of a list of weights: one 0-dim loss per weight in the accumulation dtype and one gradient per
    weight in its own dtype, empty where none is wanted; none of them with a graph.

    An epilogue with targets adds the gradients to them; those that are returned then mean nothing.
    """

    def __call__(
        self, weights: Sequence[Tensor], epilogue: Epilogue | None = None, /
    ) -> tuple[list[Tensor], list[Tensor]]: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a weight is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    return partial(run_each, [(executors[job.plan, job.operand.dtype], job.operand.with_grad) for job in jobs])


@torch.no_grad()
def run_each(
    calls: Sequence[tuple[Executor, bool]], weights: Sequence[Tensor], epilogue: Epilogue | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients, one weight after the other."""
    losses, grads = [], []
    for place, ((executor, with_grad), weight) in enumerate(zip(calls, weights, strict=True)):
        loss, grad = executor(weight, with_grad)
        losses.append(loss)
        if epilogue is not None and with_grad:
            grad = epilogue.settle(place, weight, grad, executor.plan.groups)
        grads.append(grad)
    return losses, grads


def joined(parts: Sequence[tuple[Sequence[int], Executable]]) -> Executable:
    """What executes all weights of a call, if each part executes those at its places."""
    used = [part for part in parts if part[0]]
    return used[0][1] if len(used) == 1 else partial(_run_parts, used)


def _run_parts(
    parts: Sequence[tuple[Sequence[int], Executable]], weights: Sequence[Tensor], epilogue: Epilogue | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of all parts in the order of the weights."""
    losses, grads = list(weights), list(weights)
    for places, execute in parts:
        own = None if epilogue is None else epilogue.of(places)
        some_losses, some_grads = execute([weights[place] for place in places], own)
        for place, loss in zip(places, some_losses, strict=True):
            losses[place] = loss
        for place, grad in zip(places, some_grads, strict=False):
            grads[place] = grad
    return losses, grads
