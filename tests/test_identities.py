"""The loss as mathematics: zero for orthogonal layers, a row/column identity, the norm of an explicit matrix."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from conftest import TOLERANCES, fused, grad_of
from oracle import Case, circular_matrix, dirac, from_numpy, loss_and_grad, orthogonal_matrix, polyphase

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss, reference

TIGHT = TOLERANCES[torch.float64]


def linear_orthogonal(case: Case) -> torch.Tensor:
    """Orthonormal rows of the flattened weight: enough where placements do not overlap."""
    rng = np.random.default_rng(case.seed)
    rows = case.shape[0] // case.groups
    parts = [orthogonal_matrix(rows, prod(case.shape[1:]), rng) for _ in range(case.groups)]
    return from_numpy(np.concatenate(parts).reshape(case.shape))


ORTHOGONAL = [
    *((case, dirac) for case in (
        Case((6, 6, 3, 3)),
        Case((5, 8, 5, 5)),
        Case((6, 6, 3), stride=1, dilation=2),
        Case((4, 4, 3, 3, 3)),
        Case((12, 4, 3, 3), groups=3),
        Case((7, 1, 3, 3), groups=7),
    )),
    *((case, linear_orthogonal) for case in (
        Case((6, 9)),
        Case((6, 6, 1, 1)),
        Case((6, 8, 1, 1), stride=2),
        Case((12, 3, 2, 2), stride=2),
        Case((20, 3, 3, 3), stride=3),
        Case((9, 3, 2, 3), stride=(2, 4)),
        Case((6, 2, 4), stride=4, dilation=3),
        Case((8, 2, 2, 2), stride=2, groups=2),
    )),
    *((case, Case.orthogonal) for case in (
        Case((8, 8, 3, 3)),
        Case((6, 8, 3, 3)),
        Case((6, 8, 5, 5)),
        Case((8, 8, 2, 4)),
        Case((4, 4, 2, 3, 2)),
        Case((8, 2, 3, 3), stride=2),
        Case((12, 4, 3, 3), stride=2),
        Case((16, 4, 4, 4), stride=2),
        Case((12, 4, 7, 7), stride=2),
        Case((10, 4, 7, 3), stride=(3, 1), dilation=(1, 2)),
        Case((12, 4, 5), stride=2, dilation=2, groups=3),
        Case((6, 6, 7, 7)),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("case", "build"), ORTHOGONAL, ids=lambda value: getattr(value, "__name__", str(value)))
def test_orthogonal_kernels_have_loss_zero(case: Case, build, backend: str) -> None:
    weight = build(case)
    assert weight.shape == case.shape
    for side in ("auto", "row", "column"):
        loss, gradient = fused(weight, case, side=side, backend=backend)
        constant = case.shape[0] if side != "row" else 0  # which the column side adds and subtracts
        assert 0 <= loss.item() <= 1e-22 + 1e-14 * constant
        assert gradient.abs().max() <= 1e-11
        norm, gradient = fused(weight, case, side=side, backend=backend, squared=False)
        assert norm.item() == loss.sqrt().item()
        assert gradient.isfinite().all()


def test_moving_off_orthogonal_costs() -> None:
    """The zeros above are zeros of a loss, not of a function that forgets its argument."""
    for case, build in ORTHOGONAL:
        weight = build(case)
        assert fused_orth_loss(weight * 1.01, **case.options).item() > 1e-3
        assert fused_orth_loss(weight.roll(1, -1) + weight, **case.options).item() > 1e-3


IDENTITY = [
    Case((6, 4, 3, 3)),
    Case((10, 3, 5, 4), stride=2),
    Case((20, 3, 7, 7), stride=2),
    Case((4, 6, 3, 5), stride=(2, 3)),
    Case((9, 2, 2, 3), stride=(3, 3)),
    Case((5, 4, 6), stride=2, dilation=3),
    Case((7, 5)),
    Case((4, 3, 3, 2, 3), stride=(1, 2, 2)),
]


@pytest.mark.parametrize("case", IDENTITY, ids=str)
def test_row_and_column_loss_differ_by_a_constant(case: Case, backend: str) -> None:
    """``L_row(K) = L_row(K'^T) + M - C'`` with the polyphase view K', by the definition and by the package."""
    weight = case.random()
    view = polyphase(weight.cpu().numpy(), case.steps)
    turned = from_numpy(np.ascontiguousarray(view.swapaxes(0, 1)))
    constant = view.shape[0] - view.shape[1]
    row, _ = loss_and_grad(weight, case)
    column, _ = loss_and_grad(turned, Case(tuple(turned.shape)))
    assert row == pytest.approx(column + constant, rel=TIGHT)
    assert fused_orth_loss(turned, backend=backend).item() == pytest.approx(row - constant, rel=TIGHT)
    values = [fused(weight, case, side=side, backend=backend) for side in ("row", "column")]
    for got in zip(*values, strict=True):
        torch.testing.assert_close(*got, rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (Case((3, 4)), ()),
        (Case((3, 2, 3)), (7,)),
        (Case((4, 2, 4), stride=2), (8,)),
        (Case((3, 2, 3), stride=2, dilation=3), (14,)),
        (Case((3, 2, 3, 3)), (6, 5)),
        (Case((4, 2, 3, 3), stride=2), (6, 8)),
        (Case((4, 2, 2, 4), stride=(1, 3)), (5, 9)),
        (Case((6, 2, 3, 2), stride=(2, 1), groups=3), (6, 4)),
        (Case((2, 2, 2, 1, 2)), (3, 2, 4)),
    ],
    ids=str,
)
def test_explicit_matrix_of_the_circular_convolution(case: Case, size: tuple[int, ...], backend: str) -> None:
    """``||A A^T - I||_F^2`` is the loss times the number of output positions, if no lag wraps onto another."""
    axes = zip(size, case.shape[2:], case.dilations, case.strides, strict=True)
    assert all(n > 2 * d * (k - 1) and n % s == 0 for n, k, d, s in axes)
    weight = case.random()
    matrix = circular_matrix(weight, case, size)
    positions = prod(size) // prod(case.strides)
    explicit = np.square(matrix @ matrix.T - np.eye(len(matrix))).sum()
    loss = fused_orth_loss(weight, **case.options, backend=backend)
    assert loss.item() * positions == pytest.approx(explicit, rel=TIGHT)


@pytest.mark.parametrize("case", [Case((8, 6, 3, 3)), Case((8, 3, 5), stride=2), Case((8, 4, 3, 3), groups=2)], ids=str)
def test_invariances(case: Case, backend: str) -> None:
    """Signs and order of filters, rotations of the channels and a flip of the kernel change nothing."""
    weight = case.random()
    loss = fused_orth_loss(weight, **case.options, backend=backend)
    rotation = from_numpy(orthogonal_matrix(case.shape[1], case.shape[1], np.random.default_rng(0)))
    grouped = weight.unflatten(0, (case.groups, -1))
    for other in (
        -weight,
        weight.flip(list(range(2, weight.dim()))),
        grouped.flip(1).flatten(0, 1),
        grouped.flip(0).flatten(0, 1),
        torch.einsum("mc...,dc->md...", weight, rotation),
    ):
        value = fused_orth_loss(other, **case.options, backend=backend)
        torch.testing.assert_close(value, loss, rtol=TIGHT, atol=0)


def test_zero_kernel_scores_its_rows(backend: str) -> None:
    for case in (Case((6, 4, 3, 3)), Case((64, 3, 7, 7), stride=2), Case((8, 1, 3, 3), groups=8)):
        loss, gradient = fused(torch.zeros(case.shape, dtype=torch.float64), case, backend=backend)
        assert loss.item() == pytest.approx(case.shape[0], rel=TIGHT)
        assert not gradient.any()


def test_groups_are_independent_and_add(backend: str) -> None:
    case = Case((12, 4, 3, 3), groups=3)
    weight = case.random()
    whole, gradient = fused(weight, case, backend=backend)
    alone = Case((4, 4, 3, 3))
    parts = [fused(part.contiguous(), alone, backend=backend) for part in weight.chunk(3)]
    torch.testing.assert_close(whole, sum(loss for loss, _ in parts), rtol=TIGHT, atol=0)
    torch.testing.assert_close(gradient, torch.cat([grad for _, grad in parts]), rtol=TIGHT, atol=TIGHT)


@pytest.mark.parametrize("shape", [(6, 20), (30, 4), (6, 4, 3, 3), (64, 3, 3, 3), (5, 4, 3), (6, 2, 2, 2, 3)], ids=str)
def test_kernel_orthogonality_is_the_flattened_gram(shape: tuple[int, ...], backend: str) -> None:
    weight = Case(shape).random().requires_grad_()
    flat = weight.flatten(1)
    expected = (flat @ flat.T - torch.eye(shape[0], dtype=flat.dtype)).square().sum()
    loss = kernel_orth_loss(weight, backend=backend)
    torch.testing.assert_close(loss, expected, rtol=TIGHT, atol=0)
    torch.testing.assert_close(grad_of(loss, weight), grad_of(expected, weight), rtol=TIGHT, atol=TIGHT)
    norm = kernel_orth_loss(weight, squared=False, backend=backend)
    torch.testing.assert_close(norm, expected.sqrt(), rtol=TIGHT, atol=0)


def test_padding_beyond_the_last_lag_adds_zeros(backend: str) -> None:
    for case in (Case((6, 4, 3, 3)), Case((6, 4, 4), stride=2, dilation=3)):
        weight = case.random()
        expected = fused(weight, case, backend=backend)
        wide = case.with_options(padding=tuple(p + 4 * s for p, s in zip(case.paddings, case.strides, strict=True)))
        for got, want in zip(fused(weight, wide, backend=backend), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    "case",
    [
        Case((6, 4)),
        Case((6, 4, 5), stride=2),
        Case((6, 4, 3, 4), stride=(1, 2), dilation=(2, 3), groups=2),
        Case((4, 3, 5, 5), padding=2),
        Case((4, 3, 5, 4), stride=(1, 2), dilation=(3, 2), padding=(6, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("squared", [True, False])
def test_reference_is_the_definition(case: Case, squared: bool) -> None:
    weight = case.random().requires_grad_()
    loss = reference.orth_loss(weight, **case.options, squared=squared)
    expected_loss, expected_gradient = loss_and_grad(weight, case, squared=squared)
    assert loss.item() == pytest.approx(expected_loss, rel=TIGHT)
    gradient = grad_of(loss, weight)
    torch.testing.assert_close(gradient, from_numpy(expected_gradient), rtol=TIGHT, atol=TIGHT)


def test_official_loss_and_its_defect() -> None:
    """At stride 1 it is the norm over fewer lags; at stride 2 an orthogonal kernel scores worse than none at all."""
    case = Case((6, 4, 3, 3))
    weight = case.random()
    torch.testing.assert_close(
        reference.official_orth_loss(weight), fused_orth_loss(weight, padding=1, squared=False), rtol=TIGHT, atol=0
    )
    case = Case((64, 32, 3, 3), stride=2)
    zero = reference.official_orth_loss(torch.zeros(case.shape, dtype=torch.float64), 2)
    assert zero.item() == 8
    assert reference.official_orth_loss(case.orthogonal(), 2) > zero
    assert fused_orth_loss_foreach([case.orthogonal()], 2).item() < 1e-20
