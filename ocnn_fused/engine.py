"""Problems, memory layouts and a device become something callable: backend, plans and lowering, found once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from . import backends
from .backends import Backend, fourier
from .backends.device import SPECS, described
from .backends.epilogue import Epilogue
from .backends.job import Executable, Job, LossesAndGrads, Operand, joined
from .plan import AnyPlan, FourierPlan, candidates
from .problem import Options, Precision, Problem

#: Calls on GPUs are never dropped: a captured graph may read their tables as long as it lives.
_kept: list[Executable] = []


class Resolved(NamedTuple):
    """Options with nothing left open that may change from call to call: the backend, and the precision of products,
    which PyTorch may have set differently for convolutions and for Linear layers."""

    convolution: Options
    linear: Options

    def of(self, problem: Problem) -> Options:
        return self.linear if problem.is_linear else self.convolution


def resolve(options: Options, device: torch.device) -> Resolved:
    """What the options mean now."""
    name = backends.choose(device, options.backend)
    return _resolve_for(name, options, device)


def _resolve_for(name: str, options: Options, device: torch.device | str) -> Resolved:
    resolve_precision = backends.MODULES[name].resolve_precision
    convolution, linear = (
        options._replace(backend=name, precision=resolve_precision(options.precision, device, is_linear))  # type: ignore[arg-type]
        for is_linear in (False, True)
    )
    return Resolved(convolution, linear)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: plans are thousands of small objects, none of them garbage, and one look through all that
    torch has imported takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.collect(0)  # of what is new alone, else a collection of everything may be due as soon as it is allowed
            gc.enable()


@lru_cache(maxsize=1024)
def prepare(
    problems: tuple[Problem, ...], operands: tuple[Operand, ...], options: Options | Resolved, device: torch.device
) -> Executable:
    """What computes the losses of weights that lie as ``operands`` say; the one cache of all calls that are alike.

    It returns the losses, 1-D, and one gradient per weight, empty where none is wanted, all of them without a graph.
    """
    resolved = resolve(options, device) if isinstance(options, Options) else options
    backend = backends.MODULES[resolved.convolution.backend]  # type: ignore[index]
    with _uncollected():
        plans: dict[tuple[Problem, torch.dtype], AnyPlan] = {}
        for problem, operand in zip(problems, operands, strict=True):
            if (problem, operand.dtype) not in plans:
                plans[problem, operand.dtype] = choose(problem, operand.dtype, device, resolved.of(problem)).plan
        own: dict[int, Job[AnyPlan]] = {}
        others: dict[int, Job[FourierPlan]] = {}
        for place, (problem, operand) in enumerate(zip(problems, operands, strict=True)):
            plan, precision = plans[problem, operand.dtype], resolved.of(problem).precision or "ieee"
            if backend.takes(plan, operand.dtype):
                own[place] = Job(problem, plan, operand, precision)
            else:
                others[place] = Job(problem, plan, operand, precision)  # type: ignore[arg-type]
        executable = joined(
            [
                (tuple(own), backend.prepare(tuple(own.values()), device, resolved.convolution)),  # type: ignore[arg-type]
                (tuple(others), fourier.prepare(tuple(others.values()), device)),
            ],
            device,
        )
    if device.type != "cpu":
        _kept.append(executable)
    return executable


def losses_and_grads(
    weights: Sequence[Tensor],
    problems: tuple[Problem, ...],
    options: Options,
    with_grad: Sequence[bool],
    epilogue: Epilogue | None = None,
) -> LossesAndGrads:
    """The losses, 1-D, and one gradient per weight, empty where none is wanted; none with a graph. See
    :class:`Epilogue`."""
    device = weights[0].device
    operands = tuple([Operand(w.stride(), w.dtype, wanted) for w, wanted in zip(weights, with_grad, strict=True)])
    return prepare(problems, operands, resolve(options, device), device)(weights, epilogue)


class Candidate(NamedTuple):
    """One plan for a problem, as a backend judges it."""

    plan: AnyPlan
    seconds: float  # estimated, loss and gradient
    refusal: str | None  # why it is never chosen


def judge(problem: Problem, dtype: torch.dtype, device: torch.device | str, options: Options) -> list[Candidate]:
    """Every plan for the problem, the fastest by the estimate of the backend of resolved ``options`` first."""
    backend: Backend = backends.MODULES[options.backend]  # type: ignore[index]
    precision: Precision = options.precision  # type: ignore[assignment]
    judged = []
    for plan in candidates(problem, options.side):
        if backend.takes(plan, dtype):
            arguments = plan, dtype, device, precision
            judged.append(Candidate(plan, backend.seconds(*arguments), backend.refusal(*arguments)))  # type: ignore[arg-type]
        else:
            judged.append(Candidate(plan, fourier.seconds(plan, device, precision), None))  # type: ignore[arg-type]
    return sorted(judged, key=lambda candidate: candidate.seconds)


def choose(problem: Problem, dtype: torch.dtype, device: torch.device | str, options: Options) -> Candidate:
    """The fastest that is not refused; ``options`` are resolved."""
    return next(one for one in judge(problem, dtype, device, options) if one.refusal is None)


def explain(problem: Problem, dtype: torch.dtype, device: torch.device | str, options: Options) -> str:
    """The choice of a plan with the numbers behind it, one line per candidate, cheapest first."""
    if isinstance(device, str) and device in SPECS:  # not a device of this machine: its data sheet is asked
        options = _resolve_for(options.backend or "triton", options, device).of(problem)
        where = f"{device}, {options.precision} (modelled, not measured)"
    else:
        device = torch.device(device)
        options = resolve(options, device).of(problem)
        where = "cpu" if device.type == "cpu" else f"{described(device)}, {options.precision} (modelled, not measured)"
    judged = judge(problem, dtype, device, options)
    chosen = next(one for one in judged if one.refusal is None)
    reference = chosen.plan.reference_multiply_adds
    lines = [
        f"{chosen.plan!r} by backend {options.backend} on {where}",
        f"F.conv with autograd: {reference / 1e6:.4g}M multiply-adds "
        f"({reference / max(1, chosen.plan.work.multiply_adds):.1f}x)",
        f"{'plan':<14}{'gram side':>10}{'products':>10}{'mult-adds':>12}{'elementwise':>13}"
        f"{'MB moved':>10}{'est. us':>10}",
    ]
    for one in judged:
        plan, work = one.plan, one.plan.work
        remark = "<- chosen" if one is chosen else one.refusal or ""
        lines.append(
            f"{plan.name:<14}{plan.work_rows:>10}{plan.product_count:>10}{work.multiply_adds / 1e6:>11.4g}M"
            f"{work.elementwise / 1e6:>12.4g}M{work.bytes / 1e6:>10.4g}{one.seconds * 1e6:>10.1f}   {remark}".rstrip()
        )
    if chosen.plan.offset:
        square = f"{problem.target**2:g}" if problem.target > 0 else "the free target's square"
        lines.append(
            f"The {chosen.plan.side} side differs from the row loss by "
            f"{'the constant ' if problem.target == 1 else ''}{chosen.plan.offset}"
            f"{'' if problem.target == 1 else f' times {square}'}, added back."
        )
    return "\n".join(lines)
