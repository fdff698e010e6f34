"""Fourier plans against the definition: every geometry, either transform, any cut of the frequencies."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from conftest import TOLERANCES, assert_matches_definition, errors, fused
from oracle import Case, loss_and_grad
from plans import chosen, fourier, problem

from ocnn_fused import engine, explain, fused_orth_loss_foreach, reference
from ocnn_fused import plan as planning
from ocnn_fused.backends import fourier as backend
from ocnn_fused.backends.job import Job, Operand
from ocnn_fused.plan import FourierPlan
from ocnn_fused.problem import Options

CPU = torch.device("cpu")

CASES = [
    Case((4, 3, 7)),
    Case((4, 3, 3, 3)),
    Case((6, 3, 5, 4), stride=(2, 1)),
    Case((8, 2, 7, 7), stride=2, groups=2),
    Case((5, 4, 6, 7), stride=3, dilation=2),
    Case((12, 1, 7, 7), groups=12),
    Case((12, 1, 7, 7), stride=2, groups=12),
    Case((3, 3, 3, 4, 3)),
    Case((20, 2, 7, 7), stride=2),
    Case((20, 2, 5)),
    Case((9, 4, 2, 9), stride=(1, 2), dilation=(3, 1), groups=3),
    Case((9, 8, 6, 1)),
]
#: Some lags are dropped.
PARTIAL = [
    Case((5, 3, 7), padding=3),
    Case((4, 3, 6, 5), padding=(2, 4)),
    Case((6, 2, 7, 7), stride=2, groups=2, padding=2),
    Case((3, 2, 5, 6), dilation=(1, 2), padding=(1, 4)),
]


def execute(plan: FourierPlan, case: Case, weight: torch.Tensor, with_grad: bool = True):  # type: ignore[no-untyped-def]
    call = backend.prepare([Job(problem(case), plan, Operand(weight.stride(), weight.dtype, with_grad))], CPU)
    (loss,), (grad,) = call([weight])
    return loss, grad


@pytest.mark.parametrize("piece", [4 << 20, 1 << 11], ids=["one piece", "pieces"])
@pytest.mark.parametrize("by_matrix", [True, False], ids=["matrix", "FFT"])
@pytest.mark.parametrize("case", CASES + PARTIAL, ids=str)
def test_definition(
    case: Case, by_matrix: bool, piece: int, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    monkeypatch.setattr(backend, "_MOST_ENTRIES", 1 << 30 if by_matrix else 0)
    monkeypatch.setitem(backend._PIECE_BYTES, "cpu", piece)
    sides = ("row", "column") if case.padding is None else ("row",)
    for side in sides:
        (plan,) = fourier(case, side)
        for dtype, limit in TOLERANCES.items():
            weight = case.random(dtype=dtype)
            loss, grad = execute(plan, case, weight)
            assert (grad.dtype, grad.shape) == (dtype, weight.shape)
            # On a side longer than the other a small loss is a difference of larger numbers.
            longer = side == "column" and dtype != torch.float64
            assert max(errors(loss, grad, weight, case)) <= limit * (10 if longer else 1)
            alone, nothing = execute(plan, case, weight, with_grad=False)
            assert torch.equal(alone, loss)
            assert nothing.numel() == 0


def test_parseval_without_the_package() -> None:
    """The identity itself, with complex numbers: the mean over frequencies is the definition."""
    case = Case((4, 3, 5, 4))
    weight = case.random()
    spectrum = torch.fft.fft2(weight, s=(9, 7)).permute(2, 3, 0, 1)
    residual = spectrum @ spectrum.mH - torch.eye(4)
    loss, grad = loss_and_grad(weight, case)
    assert residual.abs().square().sum().item() / 63 == pytest.approx(float(loss), rel=1e-12)
    by_fourier = 4 * torch.fft.ifft2((residual @ spectrum).permute(2, 3, 0, 1)).real[..., :5, :4]
    torch.testing.assert_close(by_fourier, torch.as_tensor(grad), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "sliced"])
def test_memory_formats(layout: str) -> None:
    case = Case((12, 9, 7, 7))
    weight = case.random(dtype=torch.float32)
    if layout == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        weight = torch.cat([weight, weight], 1)[:, :9]
    (plan,) = fourier(case, "row")
    loss, grad = execute(plan, case, weight)
    assert grad.stride() == torch.empty_like(weight).stride()
    assert max(errors(loss, grad, weight, case)) <= TOLERANCES[torch.float32]


def large_cases(count: int) -> list[Case]:
    """Random kernels of 6 to 31 taps, in one dimension up to 1001, in three up to 9."""
    rng = random.Random(7)
    cases = []
    while len(cases) < count:
        rank = rng.choice((1, 2, 2, 2, 3))
        most = {1: 1001, 2: 31, 3: 9}[rank]
        kernel = tuple(rng.randint(6, most) if rng.random() < 0.8 else rng.randint(1, 5) for _ in range(rank))
        if max(kernel) < 6:
            continue
        groups = rng.choice((1, 1, 1, 2, 8))
        rows, channels = groups * rng.randint(1, 6), 1 if groups == 8 else rng.randint(1, 6)
        stride = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rank))
        dilation = tuple(rng.choice((1, 1, 2)) for _ in range(rank))
        if rows * rows * channels // groups * prod(2 * k - 1 for k in kernel) < 3_000_000:
            cases.append(Case((rows, channels, *kernel), stride=stride, dilation=dilation, groups=groups))
    return cases


def expected(weight: torch.Tensor, case: Case) -> tuple[float, torch.Tensor]:
    """By the definition, whose plain loops take the square of the number of taps; of long kernels by F.conv."""
    if prod(case.shape[2:]) <= 100:
        loss, grad = loss_and_grad(weight, case)
        return loss, torch.as_tensor(grad)
    exact = weight.double().requires_grad_()
    value = reference.orth_loss(exact, **case.options)
    return value.item(), torch.autograd.grad(value, exact)[0]


@pytest.mark.parametrize("case", large_cases(60), ids=str)
def test_large_kernels(case: Case, backend: str) -> None:
    """Whatever is chosen: right in float64, and in float32 as accurate as a plan has to be."""
    for dtype in (torch.float64, torch.float32):
        weight = case.random(dtype=dtype).cpu()
        wanted, wanted_grad = expected(weight, case)
        loss, grad = fused(weight, case, backend=backend)
        assert abs(loss.item() - wanted) / max(1.0, wanted) <= TOLERANCES[dtype]
        difference = (grad.cpu().double() - wanted_grad).abs().max() / wanted_grad.abs().max()
        assert difference <= TOLERANCES[dtype]


@pytest.mark.parametrize(
    "shape", [(8, 8, 31, 31), (2, 2, 9, 9, 9), (4, 4, 1001), (384, 1, 31, 31), (48, 48, 7, 7), (64, 64, 5, 5, 31)]
)
def test_plans_stay_small(shape: tuple[int, ...]) -> None:
    """Nothing is enumerated that grows with the fourth power of the kernel."""
    case = Case(shape, groups=shape[0] if shape[1] == 1 else 1)
    for plan in planning.candidates(problem(case)):
        assert plan.product_count <= planning.MAX_PRODUCTS or isinstance(plan, FourierPlan)
    matrices = [tensor for tensor in vars(prepared(case).transform).values() if isinstance(tensor, torch.Tensor)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in matrices) <= 5 << 20


def prepared(case: Case) -> backend._Executor:
    return backend._Executor(fourier(case, "row")[0], torch.float32, CPU)


def test_some_lags_of_a_long_kernel() -> None:
    case = Case((3, 2, 9, 13), padding=(1, 2))
    assert [plan.name for plan in planning.candidates(problem(case))] == ["fourier/row"]
    assert_matches_definition(case.random(), case)


def test_chosen_where_it_is_faster() -> None:
    for shape in ((64, 64, 7, 7), (128, 128, 7, 7), (8, 8, 31, 31), (12, 12, 11, 11), (16, 4, 7, 7)):
        assert chosen(problem(Case(shape))).algorithm == "fourier"
    for case in (
        Case((64, 64, 3, 3)),
        Case((64, 64, 5, 5)),
        Case((64, 3, 7, 7), stride=2),
        Case((96, 1, 7, 7), groups=96),
    ):
        assert chosen(problem(case)).algorithm != "fourier"
    assert "fourier/row" in explain((64, 64, 7, 7))


def test_offered_where_toom_is_refused() -> None:
    """Five taps in TF32 and bfloat16 amplify rounding too much for points; tap pairs are many."""
    assert chosen(problem(Case((512, 512, 5, 5))), "triton", "A100", "tf32").algorithm == "fourier"
    for precision in ("tf32", "bf16"):
        judged = engine.judge(
            problem(Case((512, 512, 5, 5))), torch.float32, "A100", Options(backend="triton", precision=precision)
        )
        assert {one.plan.algorithm for one in judged if one.refusal is None} == {"fourier", "direct"}


def test_in_a_list_with_others(backend: str) -> None:
    """One call for plans of several kinds, results in order."""
    cases = [Case((8, 6, 7, 7)), Case((8, 6, 3, 3)), Case((6, 5, 9)), Case((12, 10))]
    weights = [case.random().requires_grad_() for case in cases]
    losses = fused_orth_loss_foreach(weights, backend=backend)
    grads = torch.autograd.grad(losses.sum(), weights)
    for case, weight, loss, grad in zip(cases, weights, losses, grads, strict=True):
        assert max(errors(loss.detach(), grad, weight.detach(), case)) <= TOLERANCES[torch.float64]


def test_same_bits(backend: str) -> None:
    case = Case((16, 12, 7, 7))
    weight = case.random(dtype=torch.float32)
    first, second = (fused(weight, case, backend=backend) for _ in range(2))
    assert all(map(torch.equal, first, second))
