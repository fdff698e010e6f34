"""Plans of a case of tests/oracle.py: all candidates, or the one of a given name."""

from __future__ import annotations

from oracle import Case

from ocnn_fused.plan import Plan, make_plan, reduce_axis


def candidates(case: Case, side: str = "auto") -> tuple[Plan, ...]:
    """Every plan of a case: the best one and its alternatives."""
    axes = tuple(
        reduce_axis(k, stride, dilation, None if case.padding is None else padding)
        for k, stride, dilation, padding in zip(
            case.shape[2:], case.strides, case.dilations, case.paddings, strict=True
        )
    )
    best = make_plan(case.shape[0] // case.groups, case.shape[1], axes, case.groups, side)  # type: ignore[arg-type]
    return best, *best.alternatives


def plan_named(case: Case, name: str) -> Plan:
    side = "column" if name.endswith("column") else "row"
    return next(plan for plan in (*candidates(case), *candidates(case, side)) if plan.name == name)
