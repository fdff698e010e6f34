"""Rounding of TF32 and bfloat16 products: what the tensor cores lose, or would, emulated in the interpreter."""

from __future__ import annotations

import itertools
import random
from typing import get_args

import numpy as np
import pytest
import torch
from interpreter import bf16_of_float, float_of_bf16, round_to_bf16, round_to_tf32
from oracle import Case, loss_and_grad
from plans import chosen, problem
from rounding import direct_row, draw_case, draw_weights, error_ratios, gradient, matrix_plans
from triton_support import DEVICE, on_device, plan_named, run

from ocnn_fused.backends import triton as backend
from ocnn_fused.backends.device import SPECS, spec_of
from ocnn_fused.backends.rounding import amplification
from ocnn_fused.problem import Precision

pytestmark = pytest.mark.usefixtures("poisoned_memory")

#: Of the precisions that the device has.
ROUNDINGS = {
    precision: unit
    for precision, unit in {"tf32": 2.0**-11, "bf16": 2.0**-8}.items()
    if spec_of(DEVICE).native_precision(precision) == precision
}


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    single = np.asarray(values, dtype=np.float32)
    return (round_to_tf32 if precision == "tf32" else round_to_bf16)(single).astype(np.float64)


def reference_with_rounded_operands(weight: torch.Tensor, case: Case, precision: str) -> np.ndarray:
    """The gradient by its definition, both factors of every product rounded, sums exact."""
    kernel = weight.double().cpu().numpy()
    factors = rounded(kernel, precision)
    taps = list(np.ndindex(*case.shape[2:]))
    pairs: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for u, v in itertools.product(taps, repeat=2):
        lag = tuple(a - b for a, b in zip(u, v, strict=True))
        if all(difference % step == 0 for difference, step in zip(lag, case.steps, strict=True)):
            pairs.setdefault(lag, []).append((u, v))
    gradient = np.zeros_like(kernel)
    for lag, of_lag in pairs.items():
        residual = sum(factors[(..., *u)] @ factors[(..., *v)].T for u, v in of_lag) - (not any(lag)) * np.eye(
            len(kernel)
        )
        for u, v in of_lag:
            gradient[(..., *u)] += 4 * rounded(residual, precision) @ factors[(..., *v)]
    return gradient


def error_in_units_of_the_reference(grad: torch.Tensor, weight: torch.Tensor, case: Case, precision: str) -> float:
    exact = loss_and_grad(weight, case)[1]
    reference = np.abs(reference_with_rounded_operands(weight, case, precision) - exact).max()
    assert reference > 0.1 * ROUNDINGS[precision] * np.abs(exact).max()  # the reference is rounded at all
    return float(np.abs(grad.double().cpu().numpy() - exact).max() / reference)


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *(((24, 16, taps), f"{kind}/row") for taps in (2, 3) for kind in ("toom", "direct")),
        ((24, 16, 5), "toom/row"),
        *(((12, 12, taps, taps), "toom/row") for taps in (3, 4)),
        ((16, 8, 3, 3), "toom/column"),
    ],
)
def test_gradient_error_is_at_most_four_times_the_references(precision: str, shape: tuple[int, ...], name: str) -> None:
    case = Case(shape)
    weight, plan = on_device(case), plan_named(case, name)
    assert backend.refusal(plan, torch.float32, "A100", precision) is None
    _, (grad,) = run([weight], [plan], precision=precision)
    assert error_in_units_of_the_reference(grad, weight, case, precision) <= 4


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("case", [Case((12, 8, 3, 3)), Case((12, 8, 5, 4), (2, 1))], ids=str)
def test_emulated_direct_plan_is_the_reference(case: Case, precision: str) -> None:
    weight = case.random(dtype=torch.float32).cpu()
    reference = reference_with_rounded_operands(weight, case, precision)
    np.testing.assert_allclose(gradient(weight, direct_row(case), precision).numpy(), reference, rtol=0, atol=1e-12)
    assert np.abs(reference - loss_and_grad(weight, case)[1]).max() > 0.1 * ROUNDINGS[precision]


#: Where some plan is nearly as inaccurate as may be, or has to be refused.
ROUNDED_CASES = [
    Case((32, 32, 3, 3)),
    Case((48, 16, 3, 3)),
    Case((32, 16, 3, 3), 2),
    Case((64, 8, 3, 3)),
    Case((64, 4, 3, 3)),
    Case((16, 16, 4, 4)),
    Case((16, 2, 5, 6), 2),
    Case((24, 3, 7, 7), 2),
    Case((1, 64, 5)),
    Case((128, 16, 3)),
]


def drawn_cases(count: int) -> list[Case]:
    """With some plan that may be chosen and is not direct."""
    rng = random.Random(0)
    cases = (draw_case(rng, most_work=3e6) for _ in itertools.count())
    wanted = (case for case in cases if any(not plan.is_diagonal for plan in matrix_plans(case, "tf32")))
    return list(itertools.islice(wanted, count))


@pytest.mark.parametrize("case", [*ROUNDED_CASES, *drawn_cases(12)], ids=str)
def test_no_plan_that_may_be_chosen_is_less_accurate(case: Case) -> None:
    """Weights of any size; in the PyTorch executor, which has time for larger ones."""
    for precision, (name, weight) in itertools.product(ROUNDINGS, draw_weights(case, seed=0)):
        plans = matrix_plans(case, precision)
        for plan, ratio in zip(plans, error_ratios(weight.cpu(), case, plans, precision), strict=True):
            assert ratio.rms <= (2 if plan.is_diagonal else 4), (plan.name, precision, name, ratio)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case((32, 32, 3, 3)), "toom/row"),
        (Case((48, 16, 3, 3)), "toom/column"),
        (Case((16, 16, 5, 5)), "toom/row"),
        (Case((32, 32, 4)), "toom/row"),
        (Case((32, 32, 2, 3)), "toom/row"),
        (Case((9, 9, 3, 3, 3)), "toom/row"),
    ],
    ids=str,
)
def test_amplification_is_what_emulation_finds(case: Case, name: str) -> None:
    """For random weights of the worst size, within a fifth."""
    plan, unit = plan_named(case, name), case.random().cpu()
    ratios = [error_ratios(2 ** (k / 2) * unit, case, [plan], "tf32")[0].rms for k in range(-4, 5)]
    assert max(ratios) == pytest.approx(amplification(plan), rel=0.2)


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_need_no_rounding_are_not_evaluated(precision: str, dtype: torch.dtype) -> None:
    """A direct plan takes them as they are; the planes of another would be rounded."""
    case = Case((16, 16, 3, 3))
    exact = {"tf32": (torch.float16, torch.bfloat16), "bf16": (torch.bfloat16,)}.get(precision, ())
    refusal = backend.refusal(plan_named(case, "toom/row"), dtype, "A100", precision)
    assert (refusal is not None) == (dtype in exact)
    if dtype in exact:
        weight = case.orthogonal().to(dtype).cpu()
        unused = error_ratios(weight, case, [plan_named(case, "toom/row")], precision)[0]
        assert unused.rms > 100


def test_common_shapes_keep_their_fast_plans() -> None:
    for shape, stride in [((128, 128, 3, 3), 1), ((512, 512, 3, 3), 1), ((256, 128, 3, 3), 2), ((64, 3, 7, 7), 2)]:
        case = Case(shape, stride)
        name = "toom/row" if shape[1] > 3 else "toom/column"
        assert backend.refusal(plan_named(case, name), torch.float32, "A100", "tf32") is None
        is_quicker = stride == 1 or shape[1] == 3  # elsewhere tap pairs are, by the model
        assert (chosen(problem(case), "triton", "A100", "tf32").name == name) == is_quicker


@pytest.mark.parametrize("precision", get_args(Precision))
def test_inaccurate_plans_are_refused_in_rounded_products_only(precision: str) -> None:
    inaccurate = (Case((24, 24, 3, 3, 3)), "toom/row"), (Case((24, 24, 5, 5)), "toom/row")
    by_chance = (Case((64, 4, 3, 3)), "toom/column"), (Case((1, 64, 5)), "toom/row")
    for case, name in (*inaccurate, *by_chance):
        plan = plan_named(case, name)
        refusal = backend.refusal(plan, torch.float32, "A100", precision)
        assert (refusal is not None) == (precision in ROUNDINGS)
        for spec in SPECS.values():
            native = spec.native_precision(precision)
            if native in ROUNDINGS:
                assert chosen(problem(case), "triton", spec.name, native).name != name


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_rounding_is_emulated(precision: str) -> None:
    """Canary: without the emulation the error would be that of float32."""
    case = Case((24, 16))
    weight = on_device(case)
    exact = loss_and_grad(weight, case)[1]
    _, (grad,) = run([weight], [plan_named(case, "gram/row")], precision=precision)
    error = np.abs(grad.double().numpy() - exact).max() / np.abs(exact).max()
    assert 0.05 * ROUNDINGS[precision] < error < 8 * ROUNDINGS[precision]


@pytest.mark.parametrize(
    "precision", [one for one in ("ieee", "tf32x3") if spec_of(DEVICE).native_precision(one) == one]
)
def test_full_precision_is_not_rounded(precision: str) -> None:
    case = Case((24, 16))
    weight = on_device(case)
    exact = loss_and_grad(weight, case)[1]
    _, (grad,) = run([weight], [plan_named(case, "gram/row")], precision=precision)
    assert np.abs(grad.double().numpy() - exact).max() <= 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["gram/row", "gram/column"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bf16_planes_of_any_weight(name: str, dtype: torch.dtype) -> None:
    """A bfloat16 weight is its own plane; the others are rounded to one."""
    case = Case((24, 16))
    weight = on_device(case, dtype)
    exact = loss_and_grad(weight.float(), case)[1]
    _, (grad,) = run([weight], [plan_named(case, name)], precision="bf16")
    assert grad.dtype == dtype
    assert np.abs(grad.double().numpy() - exact).max() <= 2.0**-5 * np.abs(exact).max()


def test_rounding_functions() -> None:
    values = np.array([1.0, 1.0 + 2.0**-11, 1.0 + 2.0**-9, -3.0, 0.0, np.nan], dtype=np.float32)
    assert round_to_tf32(values)[:5].tolist() == [1.0, 1.0 + 2.0**-10, 1.0 + 2.0**-9, -3.0, 0.0]
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(float_of_bf16(bf16_of_float(values)), expected)
