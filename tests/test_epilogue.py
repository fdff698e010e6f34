"""Gradients times factors, added to other tensors or to the weights themselves, against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from conftest import TOLERANCES, kernels_run
from oracle import Case, loss_and_grad
from plans import chosen
from plans import problem as problem_of_case

from ocnn_fused import _extension, engine
from ocnn_fused.backends.epilogue import Epilogue
from ocnn_fused.plan import FourierPlan
from ocnn_fused.problem import Options, options_of, problem_of

#: One of each kind of plan: flat on both sides, Toom-Cook on both sides, taps themselves, tiny groups, Fourier.
CASES = [
    Case((12, 30)),
    Case((30, 5, 1, 1)),
    Case((12, 10, 3, 3)),
    Case((9, 6, 3, 3), stride=2, groups=3),
    Case((40, 3, 3, 3)),
    Case((8, 1, 3, 3), groups=8),
    Case((4, 4, 9, 9)),
]
BACKENDS = ("cpu", "torch", "triton")


def options_for(backend: str) -> Options:
    return options_of("auto", backend, "ieee", None)


def run(
    weights: Sequence[torch.Tensor], cases: Sequence[Case], backend: str, epilogue: Epilogue
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    problems = tuple(map(problem_of_case, cases))
    with kernels_run(backend), torch.no_grad():
        return engine.losses_and_grads(weights, problems, options_for(backend), [True] * len(weights), epilogue)


def check(actual: torch.Tensor, weight: torch.Tensor, case: Case, factor: float) -> None:
    _, grad = loss_and_grad(weight, case)
    expected = factor * torch.from_numpy(grad)
    scale = max(1.0, float(abs(expected).max()))
    assert (actual.double() - expected).abs().max() <= 2 * TOLERANCES[weight.dtype] * scale, (str(case), factor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_scaled_and_added(backend: str, dtype: torch.dtype) -> None:
    """Returned, added to others, and added to the weights; of a whole list, each with a factor of its own."""
    weights = [case.random(seed, dtype) for seed, case in enumerate(CASES)]
    factors = torch.linspace(-1.0, 0.5, len(CASES), dtype=torch.float64)
    numbers = [0.25 * factor for factor in factors.tolist()]
    losses, grads = run(weights, CASES, backend, Epilogue(factors, 0.25))
    for case, weight, loss, grad, number in zip(CASES, weights, losses, grads, numbers, strict=True):
        check(grad, weight, case, number)
        assert loss.item() == pytest.approx(loss_and_grad(weight, case)[0], rel=1e-2)
    targets = [torch.zeros_like(weight) for weight in weights]
    moved = [weight.clone() for weight in weights]
    versions = [tensor._version for tensor in targets + moved]
    run(weights, CASES, backend, Epilogue(factors, 0.25, targets))
    run(moved, CASES, backend, Epilogue(factors, 0.25, moved))
    assert all(tensor._version > version for tensor, version in zip(targets + moved, versions, strict=True))
    for case, weight, target, own, number in zip(CASES, weights, targets, moved, numbers, strict=True):
        check(target, weight, case, number)
        check(own.double() - weight.double(), weight, case, number)
    again = [torch.ones_like(weight) for weight in weights]
    run(weights, CASES, backend, Epilogue(factors, 0.25, again))
    for target, more in zip(targets, again, strict=True):
        assert (more.double() - target.double() - 1).abs().max() <= 4 * TOLERANCES[dtype] * (1 + target.abs().max())


def test_all_kinds_of_plans_are_there() -> None:
    plans = [chosen(problem_of_case(case)) for case in CASES]
    assert any(isinstance(plan, FourierPlan) for plan in plans)
    others = [plan for plan in plans if not isinstance(plan, FourierPlan)]
    assert {plan.side for plan in others} == {"row", "column"}
    assert any(plan.small for plan in others)
    assert any(plan.is_flat for plan in others)


@pytest.mark.parametrize("backend", BACKENDS)
def test_targets_of_any_strides(backend: str) -> None:
    """Where a target does not lie as the weight does, the gradient comes first and is added then."""
    case = Case((12, 10, 3, 3))
    weight = case.random(0, torch.float32)
    larger = torch.zeros(12, 10, 3, 6)
    for target in (torch.zeros(10, 12, 3, 3).transpose(0, 1), larger[..., ::2], torch.zeros(1081)[1:].view(case.shape)):
        run([weight], [case], backend, Epilogue(torch.tensor([2.0], dtype=torch.float64), 1.0, [target]))
        check(target, weight, case, 2.0)
    assert not larger[..., 1::2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case((12, 10, 3, 3), groups=2), Case((8, 1, 3), groups=8), Case((4, 3, 9))], ids=str)
def test_divided_by_the_free_target_of_each_group(backend: str, case: Case) -> None:
    case = Case(case.shape, groups=case.groups, target="free")
    weight = case.random(0, torch.float32)
    weight[: weight.shape[0] // case.groups] *= 3
    moved, target = weight.clone(), torch.zeros_like(weight)
    factors = torch.tensor([-0.125], dtype=torch.float64)
    for into in (target, moved):
        own = moved if into is moved else weight
        run([own], [case], backend, Epilogue(factors, 1.0, [into], per_target=True))
    grouped = weight.double().reshape(case.groups, -1)
    free = grouped.square().sum(1) * case.groups / case.shape[0]
    _, grad = loss_and_grad(weight, case)
    expected = (-0.125 * torch.from_numpy(grad).reshape(case.groups, -1) / free[:, None]).reshape(weight.shape)
    assert (target - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (moved - weight - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("shape", [(16, 4096, 3, 3), (4096, 16, 3, 3)], ids=str)
def test_chunks_do_not_read_what_others_have_written(shape: tuple[int, ...], panels: bool) -> None:
    """A weight that is its own target, and so long that it is worked on in pieces."""
    if _extension.module is None:
        pytest.skip(_extension.unavailable_reason or "")
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    problem = problem_of(shape, 1, 1, 1, None)
    factors = torch.tensor([-0.125], dtype=torch.float64)
    before = _extension.module.use_panels(panels)
    try:
        options = options_for("cpu")
        apart, moved = torch.zeros_like(weight), weight.clone()
        for own, target in ((weight, apart), (moved, moved)):
            engine.losses_and_grads([own], (problem,), options, [True], Epilogue(factors, 1.0, [target]))
    finally:
        _extension.module.use_panels(before)
    assert torch.equal(moved, weight + apart)


def test_factors_are_neither_compiled_nor_kept() -> None:
    """Another lambda at every step meets the same prepared call, with the same numbers in it."""
    case = Case((12, 10, 3, 3))
    weight = case.random(0, torch.float32)
    run([weight], [case], "cpu", Epilogue(torch.ones(1, dtype=torch.float64), 1.0))
    misses = engine.prepare.cache_info().misses
    for factor in (0.5, 0.1, 1e-3):
        (grad,) = run([weight], [case], "cpu", Epilogue(torch.ones(1, dtype=torch.float64), factor))[1]
        check(grad, weight, case, factor)
    assert engine.prepare.cache_info().misses == misses


@pytest.mark.skipif(_extension.module is None, reason="needs the compiled extension")
def test_wrong_epilogues_are_errors() -> None:
    weight = torch.randn(4, 3, 3)
    problem = problem_of(weight.shape, 1, 1, 1, None)
    for factors in (torch.ones(1), torch.ones(2, dtype=torch.float64)[::2]):
        context = nullcontext() if factors.is_contiguous() and factors.dtype == torch.float64 else None
        with context or pytest.raises(ValueError, match="factors must be contiguous float64 numbers"):
            engine.losses_and_grads([weight], (problem,), options_for("cpu"), [True], Epilogue(factors))
    with pytest.raises(ValueError, match="there are 1 factors, not 1"):
        engine.losses_and_grads(
            [weight, weight],
            (problem, problem),
            options_for("cpu"),
            [True, True],
            Epilogue(torch.ones(1, dtype=torch.float64)),
        )
