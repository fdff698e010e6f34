"""Steps outside the loss: they lower it, never raise it, and lead to orthogonal kernels; alone and within training."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from oracle import Case, circular_matrix, loss_and_grad
from plans import problem as problem_of_case
from torch import nn

from ocnn_fused import OrthRegularizer, fused_orth_loss, orthogonalize_, projection, schedules
from ocnn_fused.plan import least_loss
from ocnn_fused.problem import DEFAULT_OPTIONS, Options, problem_of
from ocnn_fused.regularizer.distributed import sharing_pays

STARTS = 1000


def random_case(rng: random.Random) -> Case:
    axes = rng.choice([0, 1, 2])
    groups, rows, channels = rng.choice([1, 1, 2]), rng.randint(1, 6), rng.randint(1, 4)
    kernel = tuple(rng.randint(1, 4 if axes == 1 else 3) for _ in range(axes))
    stride = tuple(rng.randint(1, 2) for _ in range(axes))
    return Case((groups * rows, channels, *kernel), stride, 1, groups)


def largest_singular_value(weight: torch.Tensor, case: Case) -> float:
    """Over a fine grid of frequencies, of the polyphase matrix."""
    rows = case.shape[0] // case.groups
    kernel = weight.reshape(case.groups, rows, *case.shape[1:])
    if case.rank == 0:
        return torch.linalg.matrix_norm(kernel, 2).max().item()
    size = [16 * s for s in case.strides]
    spectrum = torch.fft.fftn(kernel, s=size, dim=tuple(range(3, 3 + case.rank)))
    # Frequencies that the stride makes one are columns of one matrix.
    for axis, stride in enumerate(case.strides):
        spectrum = spectrum.unflatten(3 + 2 * axis, (stride, 16))
    order = (0, *(4 + 2 * a for a in range(case.rank)), 1, 2, *(3 + 2 * a for a in range(case.rank)))
    matrices = spectrum.permute(order).flatten(2 + case.rank) / torch.tensor(case.strides).prod() ** 0.5
    return torch.linalg.matrix_norm(matrices.reshape(-1, rows, matrices.shape[-1]), 2).max().item()


def test_singular_values_are_those_of_the_convolution() -> None:
    for seed in range(20):
        case = random_case(random.Random(seed))
        weight = case.random()
        if case.rank < 2:
            matrix = torch.from_numpy(circular_matrix(weight, case, tuple(16 * s for s in case.strides)))
            assert largest_singular_value(weight, case) == pytest.approx(torch.linalg.matrix_norm(matrix, 2).item())


def test_loss_falls_from_every_start_below_one_and_never_rises() -> None:
    """At rate 1: without the check where no singular value is above 1, with it from anywhere."""
    rng = random.Random(0)
    for start in range(STARTS):
        case = random_case(rng)
        problem = problem_of_case(case)
        weight = case.random(seed=start)
        below = start % 2 == 0
        weight *= (rng.uniform(0.2, 0.999) if below else rng.uniform(1.0, 6.0)) / largest_singular_value(weight, case)
        losses = []
        for _ in range(4):
            losses.append(projection.step_([weight], (problem,), DEFAULT_OPTIONS, 1.0, safe=not below)[0].item())
        losses.append(loss_and_grad(weight, case)[0])
        excess = [loss - least_loss(problem) for loss in losses]
        for before, after in itertools.pairwise(excess):
            rounding = 1e-12 * (1 + losses[0])
            assert after < before or after <= rounding if below else after <= before + rounding, (case, losses)


def test_a_step_without_the_check_can_raise_the_loss() -> None:
    """What the halving is for."""
    case = Case((8, 8, 3, 3))
    problem = problem_of_case(case)
    weight = 4 * case.random()
    unsafe, safe = weight.clone(), weight.clone()
    (before,) = projection.step_([unsafe], (problem,), DEFAULT_OPTIONS, 1.0, safe=False)
    projection.step_([safe], (problem,), DEFAULT_OPTIONS, 1.0)
    assert loss_and_grad(unsafe, case)[0] > before
    assert loss_and_grad(safe, case)[0] < 0.5 * before


@pytest.mark.parametrize(
    "case",
    [
        Case((6, 4, 3, 3)),
        Case((6, 4, 3), stride=2, target=0.25),
        Case((6, 2, 3), groups=3, target="free"),
        Case((6, 4, 3), part="off_diagonal"),
    ],
    ids=str,
)
def test_step_is_the_gradient_over_eight_times_the_target(case: Case) -> None:
    weight = case.random()
    moved = weight.clone()
    projection.step_([moved], (problem_of_case(case),), DEFAULT_OPTIONS, 0.5, safe=False)
    _, gradient = loss_and_grad(weight, case)
    grouped = weight.reshape(case.groups, -1)
    scale = grouped.square().sum(1) * case.groups / case.shape[0]
    if case.target != "free" and case.part == "all":
        scale = torch.full_like(scale, float(case.target))
    step = torch.from_numpy(gradient).reshape(case.groups, -1) * (0.5 / 8 / scale)[:, None]
    assert torch.allclose(moved, weight - step.reshape(weight.shape), atol=1e-13)


def test_zero_weight_stays() -> None:
    weight = torch.zeros(4, 3, 3)
    projection.step_([weight], (problem_of(weight.shape, 1, 1, 1, None, "free"),), DEFAULT_OPTIONS, 1.0)
    assert not weight.any()


@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_several_weights_some_of_which_need_halving(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks at the losses: the same numbers come out of one path for all weights."""
    cases = [Case((8, 8, 3, 3)), Case((6, 4, 3, 3), stride=2), Case((5, 5))]
    weights = [factor * case.random() for factor, case in zip((5.0, 0.5, 3.0), cases, strict=True)]
    if device == "elsewhere":

        def refuse(*_: object) -> object:
            raise AssertionError("this would wait for a GPU")

        for name in ("item", "tolist", "nonzero", "__bool__", "__float__"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        monkeypatch.setattr(projection, "_decides_on_host", lambda tensor: False)
    before = projection.step_(weights, tuple(map(problem_of_case, cases)), Options(), 1.0)
    monkeypatch.undo()
    for weight, case, loss in zip(weights, cases, before, strict=True):
        assert loss_and_grad(weight, case)[0] < loss.item()


@pytest.mark.parametrize(
    ("case", "at_most"),
    [
        (Case((64, 64, 3, 3)), 1500),
        (Case((128, 64, 3, 3), stride=2), 1000),
        (Case((64, 1, 3, 3), groups=64), 1000),
        (Case((64, 64, 1, 1)), 200),
        (Case((32, 8, 1, 1), groups=2), 200),
    ],
    ids=str,
)
def test_orthogonalize_reaches_the_least_loss(case: Case, at_most: int) -> None:
    weight = case.random(dtype=torch.float32)
    start = weight.clone()
    options = {"stride": case.stride, "groups": case.groups}
    result = orthogonalize_(weight, **options)
    least = least_loss(problem_of_case(case))
    assert result.reached
    assert result.steps <= at_most
    assert abs(fused_orth_loss(weight.double(), **options).item() - least) <= 1e-6
    assert result.distance == pytest.approx((weight - start).norm().item(), rel=1e-5)
    again = weight.clone()
    assert orthogonalize_(again, **options, tol=2e-6).steps == 1
    assert torch.equal(again, weight)


def test_orthogonalize_stops_when_told() -> None:
    weight = Case((16, 16, 3, 3)).random()
    start, before = weight.clone(), fused_orth_loss(weight).item()
    result = orthogonalize_(weight, max_steps=5)
    assert result.distance == pytest.approx((weight - start).norm().item())
    assert not result.reached
    assert result.steps < 40
    assert 1e-6 < result.loss < before
    assert result.loss == pytest.approx(fused_orth_loss(weight).item())


# ----------------------------------------------------------------------------------------------------------------------
# In a training loop
# ----------------------------------------------------------------------------------------------------------------------


def model_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 6, 3, stride=2)).double()


def test_projection_lowers_every_layer_and_leaves_gradients_alone() -> None:
    model = model_of_two()
    reg = OrthRegularizer(model)
    before = reg.per_layer()
    reg.project_(steps=3)
    assert all(loss < before[name] for name, loss in reg.per_layer().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def checked_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of which a step is checked, from now on."""
    seen: list[torch.Tensor] = []
    halve_ = projection._halve_

    def noted(weights: list[torch.Tensor], *more: object) -> torch.Tensor:
        seen.extend(weights)
        return halve_(weights, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(projection, "_halve_", noted)
    return seen


def test_which_steps_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = checked_weights(monkeypatch)
    monkeypatch.setattr(projection, "harmless", lambda *_: -1.0)
    model = model_of_two()
    reg = OrthRegularizer(model)

    def checked(rate: float = 0.01, **options: object) -> list[int]:
        seen.clear()
        reg.project_(rate=rate, **options)  # type: ignore[arg-type]
        pointers = [layer.weight.data_ptr() for layer in model]
        return sorted(pointers.index(weight.data_ptr()) for weight in seen)

    assert [checked() for _ in range(18)] == [[0, 1], *[[]] * 15, [0, 1], []]  # the first, and each sixteenth
    assert checked(rate=0.02) == [0, 1]  # a larger rate
    assert checked() == []
    with torch.no_grad():
        model[1].weight.mul_(10)
    assert checked() == [1]  # a loss that has grown, of this layer alone
    assert checked() == []
    assert checked(safe="always") == [0, 1]
    assert checked(safe=False) == []
    model[0] = nn.Conv2d(4, 8, 3).double()
    assert checked() == [0, 1]  # other layers
    with pytest.raises(ValueError, match="safe must be one of True, False, 'always', got 1"):
        reg.project_(safe=1)  # type: ignore[arg-type]


def test_no_step_raises_the_loss_whatever_happens_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that an optimiser moves at random, steadily, ever further, or by a jump now and then."""
    seen, steps = checked_weights(monkeypatch), 0
    for seed in range(150):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        case = random_case(rng)
        problem = problem_of_case(case)
        weight = rng.choice([0.1, 0.3, 1.0, 3.0]) * case.random(seed)
        size, rate = rng.choice([0.0, 1e-3, 1e-2, 0.1, 0.3, 1.0]), rng.choice([0.3, 1.0, 1.5])
        always = torch.randn_like(weight)
        moves = {
            "noise": lambda weight=weight, size=size: weight.add_(torch.randn_like(weight), alpha=size),
            "drift": lambda weight=weight, size=size, always=always: weight.add_(always, alpha=size),
            "growth": lambda weight=weight, size=size: weight.mul_(1 + size),
            "jump": lambda weight=weight, size=size, rng=rng: weight.add_(
                torch.randn_like(weight), alpha=3 * size * (rng.random() < 0.2)
            ),
        }
        move, pasts = moves[rng.choice(list(moves))], [projection.Past()]
        for _ in range(12):
            move()
            before = loss_and_grad(weight, case)[0]
            projection.step_([weight], (problem,), DEFAULT_OPTIONS, rate, True, pasts)
            assert loss_and_grad(weight, case)[0] <= before * (1 + 1e-12) + 1e-12, (seed, case)
            steps += 1
    assert 0.05 < len(seen) / steps < 0.6  # most were not checked


def test_harmless_losses_are_harmless() -> None:
    """Just below the bound no unchecked step raises the loss; and the bound is not idle."""
    for seed in range(100):
        rng = random.Random(seed)
        case, rate = random_case(rng), rng.choice([0.5, 1.0, 1.5])
        problem = problem_of_case(case)
        weight = case.random(seed)
        orthogonalize_(weight, case.stride, groups=case.groups, tol=1e-9)
        bound, least = projection.harmless(problem, rate), least_loss(problem)
        assert bound > 0
        along, low, high = torch.randn_like(weight), 0.0, 1.0
        for _ in range(30):  # as far as the bound allows
            middle = (low + high) / 2
            is_below = loss_and_grad(weight + middle * along, case)[0] - least <= bound
            low, high = (middle, high) if is_below else (low, middle)
        weight += low * along
        before = loss_and_grad(weight, case)[0]
        projection.step_([weight], (problem,), DEFAULT_OPTIONS, rate, safe=False)
        assert loss_and_grad(weight, case)[0] <= before + 1e-12
    assert projection.harmless(problem, 2.0) < 0
    assert projection.harmless(problem_of((4, 4, 3), 1, 1, 1, None, "free"), 1.0) < 0


@pytest.mark.parametrize("target", [1, 0.5, "free"])
def test_steps_in_place_are_those_with_a_gradient_in_memory(
    target: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plans that read the weight itself, of tiny groups, in pieces, and of a weight that is there twice."""
    cases = [Case((12, 30)), Case((12, 10, 3, 3)), Case((8, 1, 3, 3), groups=8), Case((6, 6, 9)), Case((40, 3, 3, 3))]
    problems = tuple(problem_of(c.shape, 1, 1, c.groups, None, target) for c in cases)  # type: ignore[arg-type]
    before = [case.random(seed) for seed, case in enumerate(cases)]
    together, alone = ([weight.clone() for weight in before] for _ in range(2))
    projection.step_(together, problems, DEFAULT_OPTIONS, 0.5, safe=False)
    twice = before[1].clone()
    projection.step_([twice, twice], (problems[1],) * 2, DEFAULT_OPTIONS, 0.5, safe=False)
    one_by_one = before[1].clone()
    for _ in range(2):
        projection.step_([one_by_one], problems[1:2], DEFAULT_OPTIONS, 0.5, safe=False)
    monkeypatch.setattr(projection, "_can_move_at_once", lambda *_: False)
    projection.step_(alone, problems, DEFAULT_OPTIONS, 0.5, safe=False)
    for moved, checked, start in zip(together, alone, before, strict=True):
        assert not torch.equal(moved, start)
        assert torch.allclose(moved, checked, atol=1e-13)
    assert torch.allclose(twice, one_by_one, atol=1e-13)


def test_rate_schedule_and_every() -> None:
    def change(**options: object) -> list[torch.Tensor]:
        model = model_of_two()
        reg = OrthRegularizer(model, **options)  # type: ignore[arg-type]
        changes = []
        for _ in range(3):
            before = model[0].weight.detach().clone()
            reg.project_(rate=0.1)
            changes.append(model[0].weight.detach() - before)
            reg.step()
        return changes

    always = change()
    scheduled = change(schedule=schedules.Warmup(2))
    assert not scheduled[0].any()
    assert torch.allclose(scheduled[1], 0.5 * always[0])
    at_times = change(every=2)
    assert torch.equal(at_times[0], always[0])
    assert not at_times[1].any()
    assert at_times[2].any()


def test_attached_to_an_optimizer() -> None:
    model = model_of_two()
    reg = OrthRegularizer(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = reg.attach(optimizer, project=True)
    floor = sum(layer.floor for layer in reg.layers.values())
    first = sum(reg.per_layer().values()) - floor
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(2, 4, 9, 9, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    assert sum(reg.per_layer().values()) - floor < 0.2 * first
    assert reg.steps == 20
    handle.remove()
    optimizer.step()
    assert reg.steps == 20


def test_kernel_method_norms_and_frozen_layers() -> None:
    model = model_of_two()
    model[1].weight.requires_grad_(False)
    frozen = model[1].weight.clone()
    reg = OrthRegularizer(model, method="kernel", squared=False)
    before = reg.per_layer()["0"]
    reg.project_()
    assert reg.per_layer()["0"] < before
    assert torch.equal(model[1].weight, frozen)


def test_messages() -> None:
    model = model_of_two()
    with pytest.raises(ValueError, match=r"project_\(\) has no step for SRIP, the method of 0"):
        OrthRegularizer(model, method="srip").project_()
    with pytest.raises(ValueError, match="rate must be a positive number, got 0"):
        OrthRegularizer(model).project_(rate=0)
    with pytest.raises(ValueError, match="steps must be a positive int, got 0"):
        OrthRegularizer(model).project_(0)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match="cannot move the weight of 0, which is computed"):
        OrthRegularizer(model).project_()


def test_sharing_pays_for_large_models_only() -> None:
    assert sharing_pays(seconds=0.05, nbytes=45 << 20, world=4)
    assert not sharing_pays(seconds=1e-4, nbytes=1 << 20, world=2)
