"""Many weights in one call: the same bits as one by one."""

from __future__ import annotations

import pytest
import torch
from conftest import fused
from oracle import Case

from ocnn_fused import fused_orth_loss_foreach

CASES = (
    Case((24, 16, 3, 3)),
    Case((40, 3, 7, 7), stride=2),
    Case((17, 30)),
    Case((16, 1, 3, 3), stride=(1, 2), groups=16),
    Case((12, 6, 5), stride=2, dilation=2),
    Case((12, 6, 3, 3), groups=2, padding=0),
    Case((6, 5, 2, 3, 1), stride=(1, 2, 1)),
    Case((24, 16, 3, 3), stride=2, padding=(0, 2)),
    Case((24, 16, 3, 3), stride=(2, 3), dilation=(1, 3)),
)


def plural(cases: tuple[Case, ...]) -> dict[str, list]:
    return {
        "strides": [case.stride for case in cases],
        "dilations": [case.dilation for case in cases],
        "groups": [case.groups for case in cases],
        "paddings": [case.padding for case in cases],
    }


def weights_of(cases: tuple[Case, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [case.random(seed, dtype).requires_grad_() for seed, case in enumerate(cases)]


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_one_by_one(dtype: torch.dtype, squared: bool, backend: str) -> None:
    weights = weights_of(CASES, dtype)
    losses = fused_orth_loss_foreach(weights, **plural(CASES), squared=squared, backend=backend)
    assert losses.shape == (len(CASES),)
    gradients = torch.autograd.grad(losses.sum(), weights)
    for index, (weight, case) in enumerate(zip(weights, CASES, strict=True)):
        loss, gradient = fused(weight, case, squared=squared, backend=backend)
        assert torch.equal(losses[index], loss), str(case)
        assert torch.equal(gradients[index], gradient), str(case)


def test_order_changes_nothing(backend: str) -> None:
    weights = weights_of(CASES)
    forwards = fused_orth_loss_foreach(weights, **plural(CASES), backend=backend)
    backwards = fused_orth_loss_foreach(weights[::-1], **plural(CASES[::-1]), backend=backend)
    assert torch.equal(forwards, backwards.flip(0))


def test_one_value_for_all(backend: str) -> None:
    cases = (Case((6, 4, 3, 3)), Case((8, 4, 5)), Case((4, 2, 3, 3, 3)))
    weights = weights_of(cases)
    options = {"strides": 2, "dilations": 3, "groups": 2, "paddings": 6}
    lists = {name: [value] * len(cases) for name, value in options.items()}
    expected = fused_orth_loss_foreach(weights, **lists, backend=backend)
    assert torch.equal(fused_orth_loss_foreach(weights, **options, backend=backend), expected)
    assert not torch.equal(fused_orth_loss_foreach(weights, backend=backend), expected)


def test_losses_are_weighted_separately(backend: str) -> None:
    weights = weights_of(CASES, torch.float64)
    scales = torch.linspace(-1, 2, len(CASES), dtype=torch.float64)
    losses = fused_orth_loss_foreach(weights, **plural(CASES), backend=backend)
    gradients = torch.autograd.grad(losses @ scales, weights)
    for weight, case, scale, gradient in zip(weights, CASES, scales, gradients, strict=True):
        torch.testing.assert_close(gradient, scale * fused(weight, case, backend=backend)[1], rtol=1e-14, atol=0)


def test_frozen_weights_among_others(backend: str) -> None:
    weights = weights_of(CASES)
    for weight in weights[::2]:
        weight.requires_grad_(False)
    losses = fused_orth_loss_foreach(weights, **plural(CASES), backend=backend)
    losses.sum().backward()
    for index, (weight, case) in enumerate(zip(weights, CASES, strict=True)):
        loss, gradient = fused(weight, case, backend=backend)
        assert torch.equal(losses[index], loss)
        assert (weight.grad is None) if index % 2 == 0 else torch.equal(weight.grad, gradient)


def test_same_weight_twice_adds_gradients(backend: str) -> None:
    case = Case((12, 8, 3, 3))
    weight = case.random().requires_grad_()
    losses = fused_orth_loss_foreach([weight, weight], [1, 2], backend=backend)
    (gradient,) = torch.autograd.grad(losses.sum(), weight)
    parts = [fused(weight, case.with_options(stride=stride), backend=backend) for stride in (1, 2)]
    assert torch.equal(losses, torch.stack([loss for loss, _ in parts]))
    torch.testing.assert_close(gradient, parts[0][1] + parts[1][1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float32, torch.float64), torch.float64),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.bfloat16, torch.float64), torch.float64),
    ],
)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], expected: torch.dtype, backend: str) -> None:
    """The losses have the widest type; every gradient has its weight's."""
    case = Case((12, 8, 3, 3))
    weights = [case.random(dtype=dtype).requires_grad_() for dtype in dtypes]
    losses = fused_orth_loss_foreach(weights, backend=backend)
    assert losses.dtype == expected
    losses.sum().backward()
    for weight, loss in zip(weights, losses, strict=True):
        alone, gradient = fused(weight, case, backend=backend)
        assert loss.to(alone.dtype).item() == alone.item()
        assert weight.grad.dtype == weight.dtype
        assert torch.equal(weight.grad, gradient)


def test_empty_list() -> None:
    losses = fused_orth_loss_foreach([])
    assert losses.shape == (0,)
    assert losses.sum().item() == 0
    assert fused_orth_loss_foreach([], strides=[], groups=[]).shape == (0,)


def test_generators_are_taken() -> None:
    weights = weights_of(CASES[:1] * 2)
    assert torch.equal(fused_orth_loss_foreach(iter(weights)), fused_orth_loss_foreach(weights))


@pytest.mark.parametrize("name", ["strides", "dilations", "groups", "paddings"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_option_per_weight(name: str, count: int) -> None:
    weights = weights_of(CASES[:1] * 2)
    with pytest.raises(ValueError, match=rf"{name} must be one value or a sequence of 2 .*got {count}"):
        fused_orth_loss_foreach(weights, **{name: [1] * count})


def test_a_single_tensor_is_not_a_list() -> None:
    with pytest.raises((TypeError, ValueError), match="weights"):
        fused_orth_loss_foreach(torch.ones(4, 4, 3, 3))
