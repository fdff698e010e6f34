"""Errors against the definition in float64, no larger than a stated multiple of the plain formula's own.

``pytest -s`` prints the rows that ``accuracy_table.py`` prints.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from accuracy_table import CASES, HALF, measure, starts
from conftest import TOLERANCES, assert_matches_definition, errors, fused
from oracle import Case, near

SMALL = (
    Case((5, 7)),
    Case((6, 5, 4), stride=3),
    Case((8, 6, 3, 3)),
    Case((8, 6, 3, 3), stride=2),
    Case((40, 3, 7, 7), stride=2),
    Case((9, 4, 2, 5), stride=(1, 2), dilation=(3, 2)),
    Case((6, 4, 7, 2)),
    Case((6, 3, 6, 6), stride=(1, 4)),
    Case((4, 3, 3, 2, 4), stride=(2, 1, 3)),
    Case((12, 2, 3, 3), groups=3),
    Case((7, 1, 5, 5), groups=7),
    Case((8, 5, 5, 5), padding=(2, 0)),
    Case((8, 5, 5, 7), stride=2, padding=(0, 4)),
    Case((40, 33, 5, 5)),
)


def sides(case: Case) -> tuple[str, ...]:
    """All that may be asked for: the column side needs every lag of an axis, or lag zero alone."""
    taken = case.with_options(padding=None).paddings
    partial = any(0 < p < q for p, q in zip(case.paddings, taken, strict=True))
    return ("auto", "row") if partial else ("auto", "row", "column")


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_float64(case: Case, backend: str) -> None:
    for side in sides(case):
        assert_matches_definition(case.random(), case, side=side, backend=backend)


@pytest.mark.parametrize("case", [case for case in SMALL if case.has_orthogonal], ids=str)
def test_float64_near_orthogonal(case: Case, backend: str) -> None:
    for side in sides(case):
        assert_matches_definition(near(case.orthogonal(), 1e-3), case, side=side, backend=backend)


def check_rows(case: Case, dtype: torch.dtype, start: str) -> None:
    rows = list(measure(case, dtype, start))
    print("", *rows, sep="\n")
    assert all(row.passes for row in rows), "\n".join(map(str, rows))


STARTS = [pytest.param(case, start, id=f"{case}-{start}") for case in CASES for start in starts(case)]
SMALLER_STARTS = [param for param in STARTS if prod(param.values[0].shape) <= 20_000]


@pytest.mark.parametrize(("case", "start"), STARTS)
def test_float32(case: Case, start: str) -> None:
    check_rows(case, torch.float32, start)


@pytest.mark.parametrize(("case", "start"), SMALLER_STARTS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half(case: Case, start: str, dtype: torch.dtype) -> None:
    check_rows(case, dtype, start)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("side", ["row", "column"])
def test_forced_side_in_low_precision(side: str, dtype: torch.dtype, backend: str) -> None:
    """A side that nobody would choose is still right, relative to the constant that it adds."""
    for case in (Case((32, 24, 3, 3)), Case((48, 6, 4, 4), stride=2), Case((16, 40, 1, 1))):
        weight = case.random(dtype=dtype)
        loss, gradient = fused(weight, case, side=side, backend=backend)
        loss_error, grad_error = errors(loss, gradient, weight, case)
        assert loss_error <= TOLERANCES[torch.float32]
        assert grad_error <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_result_dtypes(dtype: torch.dtype, backend: str) -> None:
    """Half types return a float32 loss, because they accumulate in it, and a gradient of their own."""
    loss, gradient = fused(Case((8, 4, 3, 3)).random(dtype=dtype), Case((8, 4, 3, 3)), backend=backend)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("scale", [1e-6, 1e3])
def test_scales(scale: float, backend: str) -> None:
    """Far from unit filters the loss is a constant or a fourth power; neither may cost accuracy."""
    case = Case((24, 16, 3, 3))
    for dtype in (torch.float64, torch.float32):
        assert_matches_definition(case.random(dtype=dtype) * scale, case, backend=backend)
