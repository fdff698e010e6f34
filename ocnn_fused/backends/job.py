"""What a backend is given for one weight, and what it gives back for a list of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..plan import AnyPlan, Plan
from ..problem import Precision, Problem


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


class Executable(Protocol):
    """Executes the plans of a list of weights: one 0-dim loss per weight in the accumulation dtype and one gradient per
    weight in its own dtype, empty where none is wanted; none of them with a graph."""

    def __call__(self, weights: Sequence[Tensor], /) -> tuple[list[Tensor], list[Tensor]]: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a weight is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_bilinear(plan: AnyPlan, dtype: torch.dtype) -> bool:
    """Whether a plan is made of planes and products: all that most backends take."""
    return isinstance(plan, Plan)


def joined(parts: Sequence[tuple[Sequence[int], Executable]]) -> Executable:
    """What executes all weights of a call, if each part executes those at its places."""
    used = [part for part in parts if part[0]]
    return used[0][1] if len(used) == 1 else partial(_run_parts, used)


def _run_parts(
    parts: Sequence[tuple[Sequence[int], Executable]], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of all parts in the order of the weights."""
    losses, grads = list(weights), list(weights)
    for places, execute in parts:
        for place, loss, grad in zip(places, *execute([weights[place] for place in places]), strict=True):
            losses[place], grads[place] = loss, grad
    return losses, grads
