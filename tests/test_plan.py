"""Plans are proven, not measured: every identity here is checked over the rationals, without a rounding error."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm, prod
from unittest.mock import patch

import numpy as np
import pytest
import torch
from oracle import polyphase
from plans import chosen, problem_with

from ocnn_fused import engine, explain
from ocnn_fused import plan as planning
from ocnn_fused.backends import cpu
from ocnn_fused.backends.job import Operand
from ocnn_fused.backends.lowering import lower
from ocnn_fused.plan import Axis, Plan, Product, reduce_axis
from ocnn_fused.problem import DEFAULT_OPTIONS, Options, problem_of

CPU = Options(backend="cpu", precision="ieee")

KERNELS, STRIDES, DILATIONS = range(1, 8), range(1, 5), range(1, 4)
AXES = sorted({reduce_axis(*geometry) for geometry in itertools.product(KERNELS, STRIDES, DILATIONS)}, key=repr)
#: Axes that keep some lags besides zero, but not all.
PARTIAL = sorted(
    {reduce_axis(k, s, d, lags * lcm(s, d)) for k in KERNELS for s in (1, 2) for d in (1, 2) for lags in (1, 2, 3)}
    - set(AXES),
    key=repr,
)


def axis_id(value: object) -> str:
    axes = (value,) if isinstance(value, Axis) else value
    return "x".join(f"k{a.taps}s{a.step}t{a.lags}" for a in axes) if isinstance(axes, tuple) else str(value)


def candidates(axes: tuple[Axis, ...], sides: tuple[str, ...] = ("row", "column"), **shape: int) -> list[Plan]:
    """Every plan of these sides."""
    problem = problem_with(shape.get("rows", 64), shape.get("channels", 64), axes, shape.get("groups", 1))
    plans = [plan for side in sides for plan in planning.candidates(problem, side)]  # type: ignore[arg-type]
    return [plan for plan in plans if isinstance(plan, Plan)]


# ----------------------------------------------------------------------------------------------------------------------
# The bilinear identity
# ----------------------------------------------------------------------------------------------------------------------


def scaled(matrices: list[planning.Matrix]) -> tuple[list[np.ndarray], int]:
    """Integer matrices and their common denominator."""
    denominator = lcm(*(value.denominator for matrix in matrices for row in matrix for value in row))

    def integers(matrix: planning.Matrix) -> np.ndarray:
        rows = [[value.numerator * (denominator // value.denominator) for value in row] for row in matrix]
        return np.array(rows, dtype=object)

    return [integers(matrix) for matrix in matrices], denominator


def lag_coefficients(plan: Plan) -> tuple[np.ndarray, int]:
    """``c[t, u, v]`` with ``Z_t = sum c[t, u, v] K_u K_v^T`` as this plan computes it, times the denominator returned.

    On the row side ``u`` and ``v`` are kernel taps and all residues are summed. On the column side residues are rows of
    the Gram matrix, which share one identity, and ``u`` and ``v`` count the taps within a residue.
    """
    evaluations, scale = scaled([block.evaluation for block in plan.blocks])
    (mix, mix_transposed), mix_scale = scaled([plan.mix, plan.mix_transposed])
    size = prod(axis.taps for axis in plan.axes) if plan.side == "row" else plan.blocks[0].taps
    most_of_forms = len(plan.products) * max(abs(matrix).max() for matrix in evaluations) ** 2
    if 2 * most_of_forms * max(abs(matrix).sum() for matrix in (mix, mix_transposed)) < 2**63:
        # Machine integers hold whatever comes up, exactly, and are many times faster than Python's.
        *evaluations, mix, mix_transposed = (matrix.astype(np.int64) for matrix in (*evaluations, mix, mix_transposed))
    forms = np.zeros((plan.outputs, size, size), dtype=mix.dtype)
    for index, left, right, out in plan.products:
        form = np.multiply.outer(evaluations[index][left], evaluations[index][right])
        sources = plan.blocks[index].sources if plan.side == "row" else (tuple(range(size)),)
        for source in sources:
            assert min(source) >= 0, "a row-side class has exactly its own taps"
            forms[out][np.ix_(source, source)] += form
    result = np.zeros((len(plan.lags), size, size), dtype=mix.dtype)
    for matrix, side_forms in ((mix, forms), (mix_transposed, forms.swapaxes(1, 2))):
        for lag, out in np.argwhere(matrix):
            result[lag] += matrix[lag, out] * side_forms[out]
    return result, scale**2 * mix_scale


def expected_coefficients(plan: Plan) -> np.ndarray:
    """One where the taps differ by the lag, on every axis."""
    result = np.ones((len(plan.lags), 1, 1), dtype=np.int64)
    for index, axis in enumerate(plan.axes):
        taps = np.arange(axis.taps if plan.side == "row" else axis.class_taps(0))
        step = axis.step if plan.side == "row" else 1
        lags = np.array([lag[index] for lag in plan.lags])
        meets = (taps[:, None] - taps[None, :]) == step * lags[:, None, None]
        result = np.einsum("tuv,tab->tuavb", result, meets).reshape(len(plan.lags), len(result[0]) * len(taps), -1)
    return result


def assert_bilinear_identity(plan: Plan) -> None:
    coefficients, denominator = lag_coefficients(plan)
    assert (coefficients == denominator * expected_coefficients(plan).astype(object)).all(), plan


def assert_lags_are_half(plan: Plan) -> None:
    """Zero first, then one of each pair of opposite lags."""
    opposite = [tuple(-t for t in lag) for lag in plan.lags]
    kept = set(itertools.product(*(range(-axis.lags, axis.lags + 1) for axis in plan.axes)))
    assert plan.lags[0] == (0,) * len(plan.axes)
    assert sorted([*plan.lags, *opposite[1:]]) == sorted(kept)


def assert_runs_cover_products(plan: Plan) -> None:
    issued = Counter(
        (run.block, run.left + j, run.right + j, run.out + (0 if run.summed else j))
        for run in plan.runs
        for j in range(run.count)
    )
    assert issued == Counter(plan.products)


def assert_sources_are_polyphase(plan: Plan) -> None:
    """Every tap appears once, at its residue and place."""
    taps = [axis.taps for axis in plan.axes]
    used = sorted(u for block in plan.blocks for source in block.sources for u in source if u >= 0)
    assert used == list(range(prod(taps)))
    if plan.side == "column":
        steps = tuple(axis.step for axis in plan.axes)
        view = polyphase(1 + np.arange(prod(taps)).reshape(1, 1, *taps), steps)[0]
        assert [tuple(row.ravel() - 1) for row in view] == list(plan.blocks[0].sources)


def assert_consistent(plan: Plan) -> None:
    assert_bilinear_identity(plan)
    assert_lags_are_half(plan)
    assert_runs_cover_products(plan)
    assert_sources_are_polyphase(plan)


@pytest.mark.parametrize("kernel", KERNELS)
def test_reduced_axis_is_the_geometry(kernel: int) -> None:
    """Lags of the reduced axis are exactly the multiples of the stride at which dilated taps meet."""
    for stride, dilation in itertools.product(STRIDES, DILATIONS):
        pairs = list(itertools.product(range(kernel), repeat=2))
        farthest = dilation * (kernel - 1) // stride * stride
        for padding in (None, *range(0, farthest + 2 * stride, stride)):
            axis = reduce_axis(kernel, stride, dilation, padding)
            limit = farthest if padding is None else padding
            positions = {(u, v): dilation * (u - v) for u, v in pairs}
            meet = {pair: p for pair, p in positions.items() if p % stride == 0 and abs(p) <= limit}
            by_lag = {(u, v): (u - v) // axis.step for u, v in pairs if (u - v) % axis.step == 0}
            by_lag = {pair: t for pair, t in by_lag.items() if abs(t) <= axis.lags}
            assert meet.keys() == by_lag.keys()
            assert all(p == by_lag[pair] * lcm(stride, dilation) or p == by_lag[pair] == 0 for pair, p in meet.items())
            if padding is None or padding >= farthest:
                assert axis.lags == axis.all_lags == (kernel - 1) // (stride // gcd(stride, dilation))


def test_identity_without_axes() -> None:
    for plan in candidates(()):
        assert_consistent(plan)
        assert plan.name.startswith("gram")


@pytest.mark.parametrize("axis", AXES, ids=axis_id)
def test_identity_1d(axis: Axis) -> None:
    plans = candidates((axis,))
    expected = {("row", "direct"), ("column", "direct")}
    if 2 <= axis.class_taps(0) <= planning.MAX_TOOM_TAPS:
        expected |= {("row", "toom"), ("column", "toom")}
    assert {(plan.side, plan.algorithm) for plan in plans} == expected
    for plan in plans:
        assert_consistent(plan)


@pytest.mark.parametrize("first", AXES, ids=axis_id)
def test_identity_2d(first: Axis) -> None:
    for second in AXES:
        for plan in candidates((first, second)):
            assert_consistent(plan)


@pytest.mark.parametrize(
    "geometry",
    [
        ((3, 1, 1),) * 3,
        ((2, 1, 1), (3, 2, 1), (4, 2, 1)),
        ((1, 1, 1), (5, 2, 2), (3, 1, 3)),
        ((7, 3, 1), (2, 2, 1), (3, 2, 3)),
        ((3, 4, 2), (6, 3, 3), (1, 2, 1)),
        ((6, 1, 1), (3, 1, 1), (2, 1, 1)),
    ],
    ids=str,
)
def test_identity_3d(geometry: tuple[tuple[int, int, int], ...]) -> None:
    for plan in candidates(tuple(reduce_axis(*axis) for axis in geometry)):
        assert_consistent(plan)


@pytest.mark.parametrize("axis", PARTIAL, ids=axis_id)
def test_identity_with_partial_lags(axis: Axis) -> None:
    assert 0 < axis.lags < axis.all_lags
    whole, single = reduce_axis(3), reduce_axis(3, padding=0)
    for axes in ((axis,), (axis, axis), (axis, whole), (whole, axis), (axis, single)):
        for plan in candidates(axes, ("row",)):
            assert_consistent(plan)


def test_a_wrong_coefficient_is_found() -> None:
    """The check itself can fail: nudge each kind of coefficient once."""
    plan = next(p for p in candidates((reduce_axis(3),)) if p.algorithm == "toom")
    nudge = Fraction(1, 10**12)

    def nudged(matrix: planning.Matrix) -> planning.Matrix:
        (first, *rest), *rows = matrix
        return ((first + nudge, *rest), *rows)

    broken_block = replace(plan.blocks[0])
    vars(broken_block)["evaluation"] = nudged(broken_block.evaluation)
    for name in ("mix", "mix_transposed"):
        with patch.object(Plan, name, nudged(getattr(plan, name))), pytest.raises(AssertionError):
            assert_bilinear_identity(plan)
    products = (Product(0, 1, 1, 0), *plan.products[1:])
    for broken in (replace(plan, blocks=(broken_block,)), replace(plan, products=products)):
        with pytest.raises(AssertionError):
            assert_bilinear_identity(broken)


# ----------------------------------------------------------------------------------------------------------------------
# Whole plans, executed on integer kernels
# ----------------------------------------------------------------------------------------------------------------------


def exact_loss_and_grad(kernel: np.ndarray, axes: tuple[Axis, ...]) -> tuple[int, np.ndarray]:
    """The definition for one group, in integers."""
    rows = len(kernel)
    taps = list(np.ndindex(*kernel.shape[2:]))
    residual = {(0,) * len(axes): -np.eye(rows, dtype=object).astype(int).astype(object)}
    pairs = []
    for u, v in itertools.product(taps, repeat=2):
        steps = [divmod(a - b, axis.step) for a, b, axis in zip(u, v, axes, strict=True)]
        lag = tuple(t for t, _ in steps)
        if any(rest for _, rest in steps) or any(abs(t) > axis.lags for t, axis in zip(lag, axes, strict=True)):
            continue
        pairs.append((u, v, lag))
        residual[lag] = residual.get(lag, 0) + kernel[(..., *u)] @ kernel[(..., *v)].T
    gradient = np.zeros_like(kernel)
    for u, v, lag in pairs:
        gradient[(..., *u)] += 4 * residual[lag] @ kernel[(..., *v)]
    return sum((value * value).sum() for value in residual.values()), gradient


def execute(plan: Plan, kernel: np.ndarray) -> tuple[Fraction, np.ndarray]:
    """The five stages for one group, in rationals, from nothing but the plan."""
    rows, channels = kernel.shape[:2]
    flat = kernel.reshape(rows, channels, -1)
    flat = np.concatenate([flat, np.zeros((rows, channels, 1), dtype=object)], axis=2)  # source -1 is the zero tap
    column = plan.side == "column"

    def side(plane: np.ndarray) -> np.ndarray:
        return plane.reshape(rows, -1).T if column else plane.reshape(rows, -1)

    evaluations = [np.array(block.evaluation, dtype=object) for block in plan.blocks]
    phases = [flat[:, :, np.array(block.sources)].swapaxes(1, 2) for block in plan.blocks]  # (M, residues, C, taps)
    planes = [[side(phase @ point) for point in points] for points, phase in zip(evaluations, phases, strict=True)]

    size = plan.work_rows
    x = np.zeros((plan.outputs, size, size), dtype=object)
    for block, left, right, out in plan.products:
        x[out] += planes[block][left] @ planes[block][right].T

    def mix(matrix: planning.Matrix, values: np.ndarray) -> np.ndarray:
        return np.tensordot(np.array(matrix, dtype=object), values, 1)

    y = x.swapaxes(1, 2)
    symmetric, antisymmetric = mix(plan.symmetric, x + y), mix(plan.antisymmetric, x - y)
    symmetric[0] -= np.eye(size, dtype=int).astype(object)
    terms = np.array(plan.lag_weights, dtype=object)[:, None, None] * (symmetric**2 + antisymmetric**2)
    loss = Fraction(terms.sum(), 4)  # both triangles are summed: half of weight/2
    adjoint = mix(plan.adjoint(plan.symmetric), symmetric) + mix(plan.adjoint(plan.antisymmetric), antisymmetric)

    plane_grads = [[0 * plane for plane in block] for block in planes]
    for block, left, right, out in plan.products:
        plane_grads[block][left] += adjoint[out] @ planes[block][right]
        if not plan.self_paired[out]:
            plane_grads[block][right] += adjoint[out].T @ planes[block][left]
    gradient = np.zeros_like(flat)
    for block, points, grads in zip(plan.blocks, evaluations, plane_grads, strict=True):
        for point, grad in zip(points, grads, strict=True):
            grad = (grad.T if column else grad).reshape(rows, block.residues, channels)
            for residue, source in enumerate(block.sources):
                for m, tap in enumerate(source):
                    gradient[:, :, tap] += point[m] * grad[:, residue]
    return loss + Fraction(plan.offset, plan.groups), gradient[:, :, :-1].reshape(kernel.shape)


@pytest.mark.parametrize(
    "axes",
    [
        (),
        *((axis,) for axis in (*AXES, *PARTIAL)),
        (reduce_axis(3), reduce_axis(3)),
        (reduce_axis(3, 2), reduce_axis(3, 2)),
        (reduce_axis(4, 2), reduce_axis(3, 1)),
        (reduce_axis(6), reduce_axis(2)),
        (reduce_axis(3, padding=0), reduce_axis(3)),
        (reduce_axis(2), reduce_axis(3, 2), reduce_axis(2, 2)),
    ],
    ids=axis_id,
)
@pytest.mark.parametrize(("rows", "channels"), [(2, 3), (3, 1)])
def test_executed_exactly(axes: tuple[Axis, ...], rows: int, channels: int) -> None:
    """Loss and gradient of every candidate, of both sides, equal the definition as fractions."""
    rng = np.random.default_rng(rows)
    kernel = rng.integers(-3, 4, (rows, channels, *(axis.taps for axis in axes))).astype(object)
    loss, gradient = exact_loss_and_grad(kernel, axes)
    partial = any(axis.lags != axis.all_lags for axis in axes)
    for plan in candidates(axes, ("row",) if partial else ("row", "column"), rows=rows, channels=channels, groups=3):
        got_loss, got_gradient = execute(plan, kernel)
        assert got_loss == loss, plan
        assert (got_gradient == gradient).all(), plan


# ----------------------------------------------------------------------------------------------------------------------
# Choice, cost and presentation
# ----------------------------------------------------------------------------------------------------------------------


def square(kernel: int, stride: int) -> tuple[Axis, Axis]:
    return (reduce_axis(kernel, stride),) * 2


@pytest.mark.parametrize(
    ("kernel", "stride", "toom", "direct", "reference"),
    [
        # Products of loss and gradient in units of M*M*C. A product that is its own transpose is computed whole, so
        # that it counts as 1, not 1/2: the loss takes (points + self-paired points) / 2.
        (1, 1, None, (1, 1), 3),
        (2, 1, (5, 9), (10, 16), 108),
        (3, 1, (13, 25), (45, 81), 675),
        (3, 2, (10, 16), (17, 25), 243),
        (4, 1, (34, 64), (136, 256), 2352),
        (4, 2, (20, 36), (40, 64), 432),
        (5, 1, (52, 100), (325, 625), 6075),
        (7, 2, (89, 169), (337, 625), 7203),
    ],
)
def test_counted_multiply_adds(
    kernel: int, stride: int, toom: tuple[int, int] | None, direct: tuple[int, int], reference: int
) -> None:
    rows, channels, groups = 48, 32, 2
    unit = rows * rows * channels * groups
    plans = candidates(square(kernel, stride), ("row",), rows=rows, channels=channels, groups=groups)
    found = {plan.algorithm: plan for plan in plans}
    for algorithm, products in (("toom", toom), ("direct", direct)):
        if products is None:
            assert algorithm not in found
            continue
        assert found[algorithm].work.multiply_adds == sum(products) * unit
        assert found[algorithm].reference_multiply_adds == reference * unit


@pytest.mark.parametrize(
    ("rows", "channels", "kernel", "stride", "work_rows", "multiply_adds"),
    [
        # 12 channels, 4 taps on an axis: (34 + 64) products of 12 x 12 x 64.
        (64, 3, 7, 2, 12, 98 * 12 * 12 * 64),
        # 12 channels, 2 taps on an axis.
        (64, 3, 4, 2, 12, 14 * 12 * 12 * 64),
        (2048, 512, 1, 1, 512, 2 * 512 * 512 * 2048),
    ],
)
def test_cheap_side_is_the_column_side(
    rows: int, channels: int, kernel: int, stride: int, work_rows: int, multiply_adds: int
) -> None:
    plan = chosen(problem_with(rows, channels, square(kernel, stride)))
    assert (plan.side, plan.work_rows) == ("column", work_rows)
    assert plan.work.multiply_adds == multiply_adds
    assert plan.offset == rows - work_rows


def test_wide_weights_stay_on_the_row_side() -> None:
    """There the column loss would be a small difference of large numbers."""
    for rows, channels, kernel, stride in ((64, 64, 3, 2), (512, 2048, 1, 1), (8, 3, 3, 2)):
        assert chosen(problem_with(rows, channels, square(kernel, stride))).side == "row"


def test_column_side_needs_all_lags() -> None:
    problem = problem_with(64, 4, (reduce_axis(5, padding=2), reduce_axis(3)))
    with pytest.raises(ValueError, match=r"side='column' needs all lags .* only 5 of 9 lags are kept"):
        chosen(problem, side="column")
    assert chosen(problem).side == "row"
    assert chosen(problem_with(64, 4, (reduce_axis(5, padding=0), reduce_axis(3))), side="column").side == "column"


@pytest.mark.parametrize("side", ["row", "column"])
def test_lag_zero_alone_is_the_flattened_gram(side: str) -> None:
    plan = chosen(problem_with(32, 4, (reduce_axis(3, padding=0), reduce_axis(5, 1, 2, padding=0))), side=side)
    assert (plan.name, plan.is_flat, plan.lags) == (f"gram/{side}", True, ((0, 0),))
    assert plan.work_rows == (32 if side == "row" else 4 * 15)


def test_long_classes_are_direct() -> None:
    assert [plan.algorithm for plan in candidates((reduce_axis(7),) * 2)] == ["direct"] * 2


def test_depthwise_and_tiny_groups_are_small() -> None:
    assert chosen(problem_with(1, 1, square(3, 1), groups=256)).name == "small/row"
    assert chosen(problem_with(256, 256, square(3, 1))).name == "toom/row"


def test_choice_is_the_cheapest() -> None:
    for rows, channels, groups in ((64, 3, 1), (4, 4, 32), (512, 512, 1)):
        judged = engine.judge(problem_with(rows, channels, square(3, 1), groups), torch.float32, "cpu", CPU)
        assert len(judged) > 1
        assert all(judged[0].seconds <= other.seconds for other in judged)


def test_repr_and_explain() -> None:
    problem = problem_with(64, 3, square(7, 2), groups=2)
    plan = chosen(problem)
    assert repr(plan).startswith("Plan(toom/column for 64x3x7x7, step 2x2, groups=2: 34 products, 49 lags")
    text = explain((128, 3, 7, 7), 2, groups=2)
    assert text.splitlines()[0] == f"{plan!r} by backend cpu on cpu"
    assert f"{plan.reference_multiply_adds / 1e6:.4g}M multiply-adds" in text
    assert f"by the constant {plan.offset}" in text
    (line_of_chosen,) = (line for line in text.splitlines() if "<- chosen" in line)
    assert line_of_chosen.startswith("toom/column")
    for other in planning.candidates(problem):
        assert any(line.startswith(other.name) for line in text.splitlines())
    assert "constant" not in explain(torch.ones(64, 64, 3, 3))


def test_what_does_not_depend_on_sizes_is_computed_once() -> None:
    first, second = (chosen(problem_with(*sizes, square(5, 1))) for sizes in ((64, 32), (96, 80)))
    assert first is not second
    assert first.mix is second.mix


# ----------------------------------------------------------------------------------------------------------------------
# What planning takes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [(5, 5, 5), (4, 4, 4), (7, 7), (63,), (6, 9, 6)])
def test_plans_are_made_without_large_matrices(kernel: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend goes axis by axis: products of several axes' matrices are neither needed nor made."""
    monkeypatch.setattr(planning, "_kronecker", lambda *_: pytest.fail("a matrix of several axes was made"))
    planning._built.cache_clear()
    stride = 2 if kernel == (6, 9, 6) else 1
    for plan in planning.candidates(problem_of((24, 24, *kernel), stride, 1, 1, None)):
        if cpu.takes(plan, torch.float32):
            lower(plan, torch.float32, whole=False)


def test_planning_is_not_the_time_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection looks through everything that torch has imported: 40 ms, many times what planning takes."""
    seen: list[str] = []

    def look(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    device = torch.device("cpu")
    operand = Operand((49 * 24, 49, 7, 1), torch.float32, True)
    options = engine.resolve(DEFAULT_OPTIONS, device)
    arguments = (problem_of((23, 24, 7, 7), 1, 1, 1, None),), (operand,), options, device
    collections = []
    before = gc.get_threshold()
    gc.callbacks.append(look)
    try:
        for guard in (engine._uncollected, contextlib.nullcontext):  # the last lets collections interrupt
            monkeypatch.setattr(engine, "_uncollected", guard)
            engine.prepare.cache_clear()
            planning._built.cache_clear()
            gc.collect()
            seen.clear()
            gc.set_threshold(100, 2, 2)
            engine.prepare(*arguments)
            gc.set_threshold(*before)
            collections.append(seen.count("start"))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
    kept_off, allowed = collections
    assert gc.isenabled()
    assert kept_off <= 2, "one is due when collections are allowed again"
    assert allowed > 10, "this test would not see it"
