"""Plans of a case of tests/oracle.py, or of reduced axes: all of them, one by its name, or the chosen one."""

from __future__ import annotations

from unittest.mock import patch

import torch
from oracle import Case

from ocnn_fused import engine, plan
from ocnn_fused.backends.job import Job, Operand
from ocnn_fused.plan import AnyPlan, Axis, FourierPlan, Plan
from ocnn_fused.problem import Options, Problem, problem_of


def problem(case: Case) -> Problem:
    return problem_of(case.shape, case.stride, case.dilation, case.groups, case.padding, case.target, case.part)  # type: ignore[arg-type]


def problem_with(rows: int, channels: int, axes: tuple[Axis, ...] = (), groups: int = 1) -> Problem:
    """A problem whose axes reduce to these."""
    shape = (groups * rows, channels, *(axis.taps for axis in axes))
    padding = tuple(axis.lags * axis.step for axis in axes)
    return problem_of(shape, tuple(axis.step for axis in axes), 1, groups, padding)


def candidates(case: Case, side: str = "auto") -> tuple[Plan, ...]:
    """Those made of planes and products, however many; :func:`fourier` has the others."""
    with patch.object(plan, "MAX_PRODUCTS", 1 << 20):
        every = plan.candidates(problem(case), side)  # type: ignore[arg-type]
    return tuple(one for one in every if isinstance(one, Plan))


def fourier(case: Case, side: str = "auto") -> tuple[FourierPlan, ...]:
    return tuple(one for one in plan.candidates(problem(case), side) if isinstance(one, FourierPlan))  # type: ignore[arg-type]


def plan_named(case: Case, name: str) -> Plan:
    side = "column" if name.endswith("column") else "row"
    return next(one for one in (*candidates(case), *candidates(case, side)) if one.name == name)


def chosen(
    problem: Problem,
    backend: str = "cpu",
    device: torch.device | str = "cpu",
    precision: str = "ieee",
    dtype: torch.dtype = torch.float32,
    side: str = "auto",
) -> AnyPlan:
    """What a backend executes."""
    return engine.choose(problem, dtype, device, Options(side, backend, precision)).plan  # type: ignore[arg-type]


def job(plan: Plan, weight: torch.Tensor, with_grad: bool = True) -> Job[Plan]:
    """What a backend is given to execute this very plan."""
    problem = problem_with(plan.rows, plan.channels, plan.axes, plan.groups)
    return Job(problem, plan, Operand(weight.stride(), weight.dtype, with_grad))
