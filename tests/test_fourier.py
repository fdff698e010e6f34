"""Fourier plans against the definition, compiled and by PyTorch's calls: every geometry, transform and cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest
import torch
from conftest import BACKENDS, TOLERANCES, assert_matches_definition, errors, fused
from oracle import Case, loss_and_grad
from plans import chosen, fourier, problem
from test_cpu_backend import capability_names, run_python

from ocnn_fused import engine, explain, fused_orth_loss, fused_orth_loss_foreach, reference
from ocnn_fused import plan as planning
from ocnn_fused.backends import cpu
from ocnn_fused.backends import fourier as backend
from ocnn_fused.backends.epilogue import Epilogue
from ocnn_fused.backends.job import Job, Operand
from ocnn_fused.backends.lowering import lower
from ocnn_fused.plan import FourierPlan
from ocnn_fused.problem import DEFAULT_OPTIONS, Options

CPU = torch.device("cpu")
compiled = pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backend is left out")

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


#: Kernels whose classes are longer than a vector, shorter than half of one, or single taps on an axis.
COMPILED = [
    *CASES,
    Case((3, 4, 9, 1, 5)),
    Case((2, 3, 1, 6)),
    Case((2, 2, 40)),
    Case((17, 19, 6)),
    Case((2, 1, 17, 33)),
    Case((33, 40, 2, 3)),
    Case((6, 5, 4, 2, 7), stride=(1, 1, 2)),
    Case((70, 3, 3, 3)),
    Case((4, 130, 4), target=2.0),
    Case((6, 4, 5, 5), groups=2, target="free"),
    Case((9, 2, 4, 6), target="free"),
    Case((6, 4, 5, 4), groups=2, part="off_diagonal"),
    Case((5, 3, 6, 7), stride=2, part="off_diagonal"),
]


def sides_of(case: Case) -> tuple[str, ...]:
    return ("row", "column") if case.padding is None and case.part == "all" else ("row",)


def job(plan: FourierPlan, case: Case, weight: torch.Tensor, with_grad: bool = True) -> Job[FourierPlan]:
    return Job(problem(case), plan, Operand(weight.stride(), weight.dtype, with_grad))


def execute(
    plan: FourierPlan, case: Case, weight: torch.Tensor, with_grad: bool = True, is_compiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    jobs = [job(plan, case, weight, with_grad)]
    call = cpu.prepare(jobs, CPU, DEFAULT_OPTIONS) if is_compiled else backend.prepare(jobs, CPU)
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
    check_definition(case, is_compiled=False)


@compiled
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_definition(case: Case, poisoned_memory: None) -> None:
    check_definition(case, is_compiled=True)


def check_definition(case: Case, is_compiled: bool) -> None:
    """Both sides, in every dtype, with and without gradient."""
    for side in sides_of(case):
        (plan,) = fourier(case, side)
        for dtype, limit in TOLERANCES.items():
            weight = case.random(dtype=dtype)
            loss, grad = execute(plan, case, weight, is_compiled=is_compiled)
            assert (grad.dtype, grad.shape) == (dtype, weight.shape)
            # On a side longer than the other a small loss is a difference of larger numbers.
            longer = side == "column" and dtype != torch.float64
            assert max(errors(loss, grad, weight, case)) <= limit * (10 if longer else 1)
            alone, nothing = execute(plan, case, weight, with_grad=False, is_compiled=is_compiled)
            assert torch.equal(alone, loss)
            assert nothing.numel() == 0


@compiled
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_every_instruction_set(capability: str) -> None:
    """Vectors of every length; in a process of its own, because they are chosen once."""
    code = """
import torch
from test_fourier import COMPILED, check_definition
for case in COMPILED:
    check_definition(case, is_compiled=True)
print(torch.backends.cpu.get_cpu_capability())
"""
    if capability == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this machine has no AVX2")
    assert run_python(code, ATEN_CPU_CAPABILITY=capability).strip() in capability_names(capability)


@compiled
@pytest.mark.parametrize("case", [Case((40, 24, 7, 7)), Case((24, 1, 9, 9), groups=24), Case((3, 3, 60))], ids=str)
def test_same_bits_on_any_number_of_threads(case: Case) -> None:
    (plan,) = fourier(case, "row")
    weight = case.random(dtype=torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(execute(plan, case, weight, is_compiled=True))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@compiled
@pytest.mark.parametrize("case", [Case((4, 64, 17, 17)), Case((3, 20, 9, 9, 9))], ids=str)
def test_compiled_pieces(case: Case, poisoned_memory: None) -> None:
    """Frequencies of wide layers are worked on in pieces, whose gradients are added up."""
    (plan,) = fourier(case, "row")
    for dtype in (torch.float64, torch.float32):
        weight = case.random(dtype=dtype)
        loss, grad = execute(plan, case, weight, is_compiled=True)
        wanted, wanted_grad = expected(weight, case)
        assert abs(loss.item() - wanted) / max(1.0, wanted) <= TOLERANCES[dtype]
        assert (grad.double() - wanted_grad).abs().max() / wanted_grad.abs().max() <= TOLERANCES[dtype]
        assert torch.equal(execute(plan, case, weight, with_grad=False, is_compiled=True)[0], loss)


@compiled
def test_compiled_calls_take_lists_of_all_kinds() -> None:
    """Weights of one shape are executed together; other plans are in the same call."""
    cases = [Case((8, 6, 7, 7)), Case((8, 6, 3, 3)), Case((8, 6, 7, 7)), Case((5, 4, 9))]
    weights = [case.random(seed=seed).requires_grad_() for seed, case in enumerate(cases)]
    plans = [fourier(case, "row")[0] if case.shape[-1] > 3 else chosen(problem(case)) for case in cases]
    plans[2] = plans[0]
    jobs = [Job(problem(case), plan, Operand(weight.stride(), weight.dtype, True))
            for case, plan, weight in zip(cases, plans, weights, strict=True)]  # fmt: skip
    call = cpu.prepare(jobs, CPU, DEFAULT_OPTIONS)
    losses, grads = call(weights)
    for case, weight, loss, grad in zip(cases, weights, losses, grads, strict=True):
        assert max(errors(loss.detach(), grad, weight.detach(), case)) <= TOLERANCES[torch.float64]


@compiled
@pytest.mark.parametrize("case", [Case((4, 64, 17, 17)), Case((6, 4, 7, 7), groups=2, target="free")], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["beside", "in place"])
def test_compiled_epilogue(case: Case, in_place: bool) -> None:
    """Gradients times their factors are added to targets, also where these are the weights that are still read."""
    (plan,) = fourier(case, "row")
    weight = case.random()
    loss, grad = execute(plan, case, weight, is_compiled=True)
    factors = torch.tensor([0.5], dtype=torch.float64)
    call = cpu.prepare([job(plan, case, weight)], CPU, DEFAULT_OPTIONS)
    _, (scaled,) = call([weight], Epilogue(factors, -2.0))
    torch.testing.assert_close(scaled, -grad)
    before = weight.clone()
    target = weight if in_place else torch.ones_like(weight)
    wanted = target - grad
    (added,) = call([weight], Epilogue(factors, -2.0, [target]))[0]
    torch.testing.assert_close(added, loss)
    torch.testing.assert_close(target, wanted)
    assert in_place or torch.equal(weight, before)


@compiled
def test_warm_calls_are_compiled() -> None:
    weight = Case((16, 4, 7, 7)).random(dtype=torch.float32).requires_grad_()
    loss = fused_orth_loss(weight)
    assert "fourier" in explain((16, 4, 7, 7)).splitlines()[0]
    assert type(loss.grad_fn).__name__ == "OrthNodeBackward"


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
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=compiled)], ids=["calls", "compiled"])
def test_memory_formats(layout: str, is_compiled: bool) -> None:
    case = Case((12, 9, 7, 7))
    weight = case.random(dtype=torch.float32)
    if layout == "channels last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        weight = torch.cat([weight, weight], 1)[:, :9]
    (plan,) = fourier(case, "row")
    loss, grad = execute(plan, case, weight, is_compiled=is_compiled)
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
    (plan,) = fourier(case, "row")
    transform = backend._Executor(plan, torch.float32, CPU).transform
    assert storage(list(vars(transform).values())) <= 5 << 20
    for dtype in (torch.float32, torch.float64):
        if cpu.takes(plan, dtype):
            assert storage(lower(plan, dtype)[1:]) <= 5 << 20


def storage(values: Sequence[object]) -> int:
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


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
