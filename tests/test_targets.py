"""Free scale, other targets and the off-diagonal part, against the definition on every backend; and derivatives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import TOLERANCES, assert_matches_definition, fused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Case, loss_and_grad
from plans import candidates, problem
from test_properties import cases, sides, stored

from ocnn_fused import (
    OrthRegularizer,
    explain,
    fused_orth_loss,
    fused_orth_loss_foreach,
    kernel_orth_loss,
    reference,
)
from ocnn_fused.plan import least_loss

#: Everything that can be asked of the diagonal.
ASKED = [
    {"target": "free"},
    {"target": 0.3},
    {"target": 2.5},
    {"part": "off_diagonal"},
]

#: One for each way through the compiled code: panels, BLAS, lag 0, lags as outputs, small groups; rows and columns.
CASES = [
    Case((20, 16, 3, 3)),
    Case((24, 8, 3, 3), stride=2),
    Case((70, 3, 3, 3), stride=2, groups=2),
    Case((12, 5, 3, 3), groups=3),
    Case((300, 4, 3)),
    Case((24, 40)),
    Case((40, 6, 1, 1), groups=2),
    Case((9, 8, 7)),
    Case((60, 4, 7), groups=2),
    Case((34, 1, 3, 3), groups=34),
    Case((18, 2, 3, 3), stride=2, groups=6),
    Case((8, 6, 5, 5), padding=2),
    Case((6, 4, 3, 3), stride=2, dilation=2),
    Case((4, 3, 3, 3, 3)),
]


def asked_of(case: Case) -> list[Case]:
    return [replace(case, **asked) for asked in ASKED]


def sides_of(case: Case) -> list[str]:
    return ["auto", "row"] if case.part == "off_diagonal" else sides(case)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_definition(
    case: Case, asked: dict[str, object], dtype: torch.dtype, backend: str, poisoned_memory: None
) -> None:
    case = replace(case, **asked)  # type: ignore[arg-type]
    for side in sides_of(case) if dtype == torch.float64 else ["auto"]:
        assert_matches_definition(case.random(dtype=dtype), case, backend=backend, side=side)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_matches_definition_in_any_geometry(backend: str, data: st.DataObject) -> None:
    asked = data.draw(st.sampled_from([*ASKED, {"target": data.draw(st.floats(0.01, 100.0))}]))
    case = replace(data.draw(cases()), **asked)  # type: ignore[arg-type]
    layout = data.draw(st.sampled_from(["contiguous", "channels_last", "stepped"]))
    weight = stored(case.random(seed=data.draw(st.integers(0, 99))), layout).weight
    expected_loss, expected_grad = loss_and_grad(weight, case)
    # A large target makes the loss a difference of large numbers; with one filter a free one leaves nothing at all.
    target = 1.0 if case.target == "free" else float(case.target)
    limit = TOLERANCES[torch.float64] * max(1.0, target) ** 2
    for side in sides_of(case):
        loss, gradient = fused(weight, case, backend=backend, side=side)
        assert abs(loss.item() - expected_loss) <= limit * max(1.0, expected_loss)
        largest = max(abs(expected_grad).max(), weight.abs().max().item())
        assert abs(gradient.cpu().numpy() - expected_grad).max() <= limit * largest


@pytest.mark.parametrize("case", [one for case in CASES for one in asked_of(case)], ids=str)
def test_reference_is_the_definition(case: Case) -> None:
    weight = case.random().requires_grad_()
    loss = reference.orth_loss(weight, **case.options)
    loss.backward()
    expected_loss, expected_grad = loss_and_grad(weight, case)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12, abs=1e-12)
    for gradient in (weight.grad, reference.grad_of(weight.detach(), problem(case))):
        assert torch.allclose(gradient, torch.from_numpy(expected_grad), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", [one for case in CASES[:2] + CASES[5:6] for one in asked_of(case)], ids=str)
def test_free_target_is_the_best(case: Case) -> None:
    """No fixed target has a smaller loss; nor is the derivative with respect to it anything but zero."""
    weight = case.random()
    free = fused_orth_loss(weight, **replace(case, target="free", part="all").options)
    best = weight.square().sum().item() / case.shape[0]
    assert fused_orth_loss(weight, **replace(case, target=best, part="all").options).item() == pytest.approx(
        free.item()
    )
    for factor in (0.9, 1.1):
        other = replace(case, target=factor * best, part="all")
        assert fused_orth_loss(weight, **other.options) > free


SMALL = [Case((4, 3, 3)), Case((6, 2, 2, 2), stride=2, groups=2), Case((5, 1, 3)), Case((3, 1, 3), groups=3)]


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("case", [one for case in SMALL for one in asked_of(case)], ids=str)
def test_gradients_of_first_and_second_order(case: Case, squared: bool, backend: str) -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss(weight, **case.options, squared=squared, backend=backend)

    weight = case.random().requires_grad_()
    assert torch.autograd.gradcheck(loss, weight, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(loss, weight)


@pytest.mark.parametrize("case", asked_of(Case((4, 3, 3), groups=2)), ids=str)
def test_hessian_product_is_that_of_autograd(case: Case) -> None:
    weight, vector = case.random(), case.random(seed=1)
    expected = torch.autograd.functional.vhp(lambda w: reference.orth_loss(w, **case.options), weight, vector)[1]
    assert torch.allclose(reference.hessian_product(weight, vector, problem(case)), expected, atol=1e-12)
    hessian = torch.func.hessian(lambda w: fused_orth_loss(w, **case.options))(weight)
    assert torch.allclose(torch.tensordot(hessian, vector, weight.dim()), expected, atol=1e-12)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_compiled(asked: dict[str, object], backend: str) -> None:
    case = replace(Case((8, 6, 3, 3), stride=2), **asked)  # type: ignore[arg-type]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return 2 * fused_orth_loss(weight, **case.options, backend=backend)

    weight = case.random().requires_grad_()
    value = loss(weight)
    (gradient,) = torch.autograd.grad(value, weight)
    expected_loss, expected_grad = loss_and_grad(weight, case)
    assert value.item() == pytest.approx(2 * expected_loss)
    assert torch.allclose(gradient.cpu(), 2 * torch.from_numpy(expected_grad), atol=1e-10)


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_many_weights_and_kernel_orthogonality(asked: dict[str, object], backend: str) -> None:
    weights = [case.random() for case in CASES[:4]]
    strides, groups = [case.stride for case in CASES[:4]], [case.groups for case in CASES[:4]]
    losses = fused_orth_loss_foreach(weights, strides, groups=groups, backend=backend, **asked)  # type: ignore[arg-type]
    for loss, case, weight in zip(losses, CASES, weights, strict=False):
        assert loss.item() == pytest.approx(loss_and_grad(weight, replace(case, **asked))[0])  # type: ignore[arg-type]
    flat = kernel_orth_loss(weights[0], backend=backend, **asked)  # type: ignore[arg-type]
    assert flat.item() == pytest.approx(loss_and_grad(weights[0], replace(CASES[0], padding=0, **asked))[0])  # type: ignore[arg-type]


def test_scale_does_not_matter_to_a_free_target() -> None:
    """The loss of ``c K`` is ``c^4`` times that of K: its minima are rays."""
    weight = Case((16, 8, 3, 3)).random()
    assert fused_orth_loss(3 * weight, target="free").item() == pytest.approx(
        81 * fused_orth_loss(weight, target="free").item()
    )


def test_column_side_is_left_out_of_the_off_diagonal_part() -> None:
    case = Case((70, 3, 3, 3), stride=2)
    assert {plan.side for plan in candidates(case)} == {"row", "column"}
    assert {plan.side for plan in candidates(replace(case, part="off_diagonal"))} == {"row"}
    with pytest.raises(ValueError, match="side='column' needs part='all'"):
        fused_orth_loss(case.random(), stride=2, part="off_diagonal", side="column")


def test_least_loss() -> None:
    case = Case((70, 3, 3, 3), stride=2, groups=2)
    surplus = 2 * (35 - 12)
    assert least_loss(problem(case)) == surplus
    assert least_loss(problem(replace(case, target=0.5))) == surplus / 4
    assert least_loss(problem(replace(case, target="free"))) == 0
    assert "46 times 0.25, added back" in explain(case.shape, 2, groups=2, target=0.5, side="column")
    assert "46 times the free target's square" in explain(case.shape, 2, groups=2, target="free", side="column")


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"target": 0.0}, ValueError, "target must be a positive number or 'free', got 0.0"),
        ({"target": float("nan")}, ValueError, "target must be a positive"),
        ({"target": float("inf")}, ValueError, "target must be a positive"),
        ({"target": "none"}, TypeError, "target must be a positive number or 'free', got 'none'"),
        ({"target": None}, TypeError, "target must be"),
        ({"part": "diagonal"}, ValueError, "part must be one of 'all', 'off_diagonal', got 'diagonal'"),
        ({"part": "off_diagonal", "target": 2.0}, ValueError, "target must be left out with part='off_diagonal'"),
        ({"part": "off_diagonal", "target": "free"}, ValueError, "target must be left out"),
    ],
)
def test_messages(asked: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_orth_loss(torch.ones(2, 2), **asked)  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        OrthRegularizer(torch.nn.Linear(4, 4), include="*", **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("method", ["conv", "kernel"])
def test_regularizer(asked: dict[str, object], method: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 6, 3, stride=2), torch.nn.Conv2d(6, 6, 3, groups=2)).double()
    reg = OrthRegularizer(model, 0.5, method=method, **asked)  # type: ignore[arg-type]
    padding = None if method == "conv" else 0
    made = [Case((6, 8, 3, 3), 2, padding=padding), Case((6, 3, 3, 3), groups=2, padding=padding)]
    expected = [loss_and_grad(layer.weight, replace(case, **asked)) for layer, case in zip(model, made, strict=True)]  # type: ignore[arg-type]
    assert reg().item() == pytest.approx(0.5 * sum(loss for loss, _ in expected))
    reg.add_grad_()
    for layer, (_, gradient) in zip(model, expected, strict=True):
        assert torch.allclose(layer.weight.grad, 0.5 * torch.from_numpy(gradient), atol=1e-10)
    shown = str(reg)
    assert ("off-diagonal part" if "part" in asked else f"target {asked['target']}") in shown


def test_regularizer_attributes_and_srip() -> None:
    reg = OrthRegularizer(torch.nn.Conv2d(8, 6, 3), 1.0)
    before = reg().item()
    reg.target = "free"
    assert reg().item() < before
    with pytest.raises(ValueError, match="must be left out with method 'srip'"):
        reg.method = "srip"


def test_norm_of_kernel_orthogonality_by_columns() -> None:
    """The smaller Gram matrix with the scale that suits it best."""
    layer = torch.nn.Conv2d(4, 12, 1).double()
    reg = OrthRegularizer(layer, 1.0, method="kernel", squared=False, target="free")
    matrix = layer.weight.flatten(1)
    gram = matrix.T @ matrix
    residual = gram - torch.eye(4, dtype=torch.float64) * gram.trace() / 4
    assert reg().item() == pytest.approx(residual.norm().item())
