"""Rounding of TF32 and bfloat16 products, emulated in the interpreter: what the tensor cores would lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import Case, loss_and_grad
from triton_support import ON_GPU, needs_interpreter, on_device, plan_named, run

if not ON_GPU:
    from interpreter import bf16_of_float, float_of_bf16, round_to_bf16, round_to_tf32

pytestmark = [needs_interpreter, pytest.mark.usefixtures("poisoned_memory")]

ROUNDINGS = {"tf32": 2.0**-11, "bf16": 2.0**-8}


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    single = np.asarray(values, dtype=np.float32)
    return (round_to_tf32 if precision == "tf32" else round_to_bf16)(single).astype(np.float64)


def reference_with_rounded_operands(weight: torch.Tensor, precision: str) -> np.ndarray:
    """Gradient of a 1-D kernel by its definition, both factors of every product rounded, sums exact."""
    kernel = weight.double().numpy()
    rows, _, taps = kernel.shape
    factors = rounded(kernel, precision)
    gradient = np.zeros_like(kernel)
    for lag in range(-(taps - 1), taps):
        pairs = [(u, u - lag) for u in range(taps) if 0 <= u - lag < taps]
        residual = sum(factors[:, :, u] @ factors[:, :, v].T for u, v in pairs) - (lag == 0) * np.eye(rows)
        for u, v in pairs:
            gradient[:, :, u] += 4 * rounded(residual, precision) @ factors[:, :, v]
    return gradient


@pytest.mark.parametrize("precision", ROUNDINGS)
@pytest.mark.parametrize("name", ["toom/row", "direct/row"])
@pytest.mark.parametrize("taps", [2, 3])
def test_gradient_error_is_at_most_four_times_the_references(precision: str, name: str, taps: int) -> None:
    case = Case((24, 16, taps))
    weight = on_device(case)
    exact = loss_and_grad(weight, case)[1]
    _, (grad,) = run([weight], [plan_named(case, name)], precision=precision)
    error = np.abs(grad.double().numpy() - exact).max()
    reference = np.abs(reference_with_rounded_operands(weight, precision) - exact).max()
    assert reference > 0.1 * ROUNDINGS[precision] * np.abs(exact).max()  # the reference is rounded at all
    assert error <= 4 * reference, (error, reference)


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_rounding_is_emulated(precision: str) -> None:
    """Canary: without the emulation the error would be that of float32."""
    case = Case((24, 16))
    weight = on_device(case)
    exact = loss_and_grad(weight, case)[1]
    _, (grad,) = run([weight], [plan_named(case, "gram/row")], precision=precision)
    error = np.abs(grad.double().numpy() - exact).max() / np.abs(exact).max()
    assert 0.05 * ROUNDINGS[precision] < error < 8 * ROUNDINGS[precision]


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
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
