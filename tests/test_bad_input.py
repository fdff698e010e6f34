"""Bad input ends in an error that names the argument, what was expected and what came; NaN and Inf propagate."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from oracle import Case

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss

WEIGHT = torch.ones(6, 4, 3, 3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*quantized tensor creation", "ignore:Sparse CSR", "ignore:The PyTorch API of nested"
)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(WEIGHT, 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(4, 4), torch.ones(2, 4)])


WEIGHTS = [
    pytest.param(torch.tensor(1.0), ValueError, r"weight .*2 \(Linear\) to 5 \(Conv3d\) .*got shape \(\)", id="rank 0"),
    pytest.param(torch.ones(4), ValueError, r"weight .*2 .*to 5 .*got shape \(4,\)", id="rank 1"),
    pytest.param(torch.ones(2, 2, 1, 1, 1, 1), ValueError, r"weight .*2 .*to 5 .*got shape \(2, 2, 1", id="rank 6"),
    pytest.param(torch.ones(0, 4, 3, 3), ValueError, r"weight .*empty.*got shape \(0, 4, 3, 3\)", id="no filters"),
    pytest.param(torch.ones(4, 0, 3, 3), ValueError, r"weight .*empty.*got shape \(4, 0, 3, 3\)", id="no channels"),
    pytest.param(torch.ones(4, 4, 3, 0), ValueError, r"weight .*empty.*got shape \(4, 4, 3, 0\)", id="no taps"),
    pytest.param(torch.ones(4, 4, dtype=torch.int64), TypeError, r"weight .*float64.*got torch\.int64", id="integer"),
    pytest.param(torch.ones(4, 4, dtype=torch.bool), TypeError, r"weight .*float64.*got torch\.bool", id="bool"),
    pytest.param(torch.ones(4, 4, dtype=torch.complex64), TypeError, r"weight .*got torch\.complex64", id="complex"),
    pytest.param(torch.ones(4, 4).to(torch.float8_e4m3fn), TypeError, r"weight .*got torch\.float8", id="float8"),
    pytest.param(lambda: torch.eye(4).to_sparse(), TypeError, r"weight .*dense.*torch\.sparse_coo", id="coo"),
    pytest.param(lambda: torch.eye(4).to_sparse_csr(), TypeError, r"weight .*dense.*torch\.sparse_csr", id="csr"),
    pytest.param(quantised, TypeError, r"weight .*float64.*got torch\.qint8", id="quantised"),
    pytest.param(nested, TypeError, r"weight must be one dense tensor, got a nested one", id="nested"),
    pytest.param([[1.0]], TypeError, r"weight must be a tensor, got list", id="list"),
    pytest.param(None, TypeError, r"weight must be a tensor, got NoneType", id="None"),
]  # fmt: skip

OPTIONS = [
    ({"stride": 0}, ValueError, r"stride must be a positive int or a tuple of 2, got 0"),
    ({"stride": -1}, ValueError, r"stride must be a positive int .*got -1"),
    ({"stride": (1, 0)}, ValueError, r"stride must be a positive int or a tuple of 2, got \(1, 0\)"),
    ({"stride": (1,)}, ValueError, r"stride must be a positive int or a tuple of 2, got \(1,\)"),
    ({"stride": (1, 1, 1)}, ValueError, r"stride .*tuple of 2, got \(1, 1, 1\)"),
    ({"stride": 1.5}, TypeError, r"stride .*got 1\.5"),
    ({"stride": (1, 2.0)}, TypeError, r"stride .*got \(1, 2\.0\)"),
    ({"stride": "11"}, TypeError, r"stride .*got '11'"),
    ({"stride": None}, TypeError, r"stride .*got None"),
    ({"stride": True}, TypeError, r"stride .*got True"),
    ({"dilation": 0}, ValueError, r"dilation must be a positive int or a tuple of 2, got 0"),
    ({"dilation": (1, 2, 3)}, ValueError, r"dilation .*tuple of 2, got \(1, 2, 3\)"),
    ({"dilation": 0.5}, TypeError, r"dilation .*got 0\.5"),
    ({"groups": 4}, ValueError, r"groups must be positive and divide weight\.shape\[0\] = 6, got 4"),
    ({"groups": 0}, ValueError, r"groups must be positive .*got 0"),
    ({"groups": -2}, ValueError, r"groups must be positive .*got -2"),
    ({"groups": 2.0}, TypeError, r"groups must be a positive int, got 2\.0"),
    ({"groups": (2,)}, TypeError, r"groups must be a positive int, got \(2,\)"),
    ({"padding": -1}, ValueError, r"padding must be a non-negative int or a tuple of 2, got -1"),
    ({"padding": (0, 1, 1)}, ValueError, r"padding .*tuple of 2, got \(0, 1, 1\)"),
    ({"padding": 0.5}, TypeError, r"padding .*got 0\.5"),
    ({"padding": "same"}, TypeError, r"padding .*got 'same'"),
    ({"padding": 1, "stride": 2}, ValueError, r"padding must be a multiple .*got \(1, 1\) with stride \(2, 2\)"),
    ({"padding": (2, 3), "stride": (2, 2)}, ValueError, r"padding must be a multiple of the stride .*got \(2, 3\)"),
    ({"side": "both"}, ValueError, r"side must be one of 'auto', 'row', 'column', got 'both'"),
    ({"side": None}, ValueError, r"side must be .*got None"),
    ({"side": "column", "padding": 1}, ValueError, r"side='column' needs all lags.*padding=\(1, 1\).*3 of 5 lags"),
    ({"backend": "cuda12"}, ValueError, r"backend must be None or one of .*'cpu'.*'torch'.*got 'cuda12'"),
    ({"backend": ""}, ValueError, r"backend must be None or one of .*got ''"),
]  # fmt: skip


def plural(options: dict[str, Any]) -> dict[str, Any]:
    names = {"stride": "strides", "dilation": "dilations", "padding": "paddings"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize(("weight", "error", "message"), WEIGHTS)
def test_bad_weight(weight: Any, error: type[Exception], message: str) -> None:
    weight = weight() if callable(weight) else weight
    for function in (fused_orth_loss, kernel_orth_loss):
        with pytest.raises(error, match=message):
            function(weight)
    with pytest.raises(error, match=rf"weights\[1\]: {message}"):
        fused_orth_loss_foreach([WEIGHT, weight])


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=str)
def test_bad_option(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_orth_loss(WEIGHT, **options)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS, ids=str)
def test_bad_option_of_one_of_many(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The message is the same, behind the weight's place in the list."""
    good = {"stride": 1, "dilation": 1, "groups": 1, "padding": None}
    lists = {name: [good[name], value] if name in good else value for name, value in options.items()}
    if set(options) & set(good):
        message = rf"weights\[1\]: {message}"
    with pytest.raises(error, match=message):
        fused_orth_loss_foreach([WEIGHT, WEIGHT], **plural(lists))


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional"):
        fused_orth_loss(WEIGHT, 1, 1)


@pytest.mark.parametrize("name", ["strides", "dilations", "groups", "paddings"])
@pytest.mark.parametrize("value", [2.0, True, {1, 2}], ids=str)
def test_one_value_for_all_weights(name: str, value: Any) -> None:
    message = rf"{name} must be one int or a sequence of 2 \(one entry per weight\), got {re.escape(repr(value))}"
    with pytest.raises(TypeError, match=message):
        fused_orth_loss_foreach([WEIGHT, WEIGHT], **{name: value})


def test_linear_takes_no_tuple() -> None:
    with pytest.raises(ValueError, match=r"stride .*tuple of 0, got \(1, 1\)"):
        fused_orth_loss(torch.ones(4, 4), (1, 1))
    with pytest.raises(ValueError, match=r"stride must be a positive int .*got 0"):
        fused_orth_loss(torch.ones(4, 4), 0)


def test_devices_must_agree() -> None:
    with pytest.raises(ValueError, match="weights must be on one device, got cpu and meta"):
        fused_orth_loss_foreach([WEIGHT, WEIGHT.to("meta")])


def test_a_refused_call_writes_nothing() -> None:
    weight = WEIGHT.clone()
    for options, error, _ in OPTIONS:
        with pytest.raises(error):
            fused_orth_loss(weight, **options)
    assert torch.equal(weight, WEIGHT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "case",
    [
        Case((6, 4, 3, 3)),
        Case((40, 3, 5, 5), stride=2),
        Case((6, 4, 7)),
        Case((5, 9)),
        Case((8, 1, 3, 3), groups=8),
        Case((20, 24, 3, 3)),
        Case((6, 4, 5, 5), padding=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("squared", [True, False])
def test_nan_and_inf_propagate(value: float, case: Case, squared: bool, backend: str) -> None:
    """Never a finite number, never an exception, and the weight stays as it is."""
    weight = case.random(dtype=torch.float32)
    weight[(-1, 0, *(k - 1 for k in case.shape[2:]))] = value
    before = weight.clone()
    weight.requires_grad_()
    loss = fused_orth_loss(weight, **case.options, squared=squared, backend=backend)
    assert not loss.isfinite()
    assert loss.isnan() or loss == float("inf")
    (gradient,) = torch.autograd.grad(loss, weight)
    assert not gradient.isfinite().all()
    assert torch.equal(weight.detach().nan_to_num(), before.nan_to_num())


def test_nan_stays_in_its_weight(backend: str) -> None:
    losses = fused_orth_loss_foreach([WEIGHT, WEIGHT * float("nan"), WEIGHT], backend=backend)
    assert losses.isnan().tolist() == [False, True, False]


def test_overflow_is_infinite(backend: str) -> None:
    """As PyTorch's own sums of squares: no error, no wrap-around."""
    for dtype in (torch.float32, torch.bfloat16):
        assert fused_orth_loss((WEIGHT * 1e15).to(dtype), backend=backend) == float("inf")


@pytest.mark.parametrize("stride", [True, (True, True), 1.0, (1.0, 1.0)], ids=str)
def test_bad_arguments_that_equal_good_ones(stride: object) -> None:
    """Arguments found good are remembered; these only compare equal to them."""
    weight = torch.randn(4, 3, 3, 3)
    assert fused_orth_loss(weight, 1) == fused_orth_loss(weight, (1, 1)) == fused_orth_loss(weight, [1, 1])
    with pytest.raises(TypeError, match="stride must be a positive int"):
        fused_orth_loss(weight, stride)  # type: ignore[arg-type]
