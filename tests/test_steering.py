"""``weight="auto"``: what an excess is, where steered lambdas arrive, and that all ways to call agree."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from ocnn_fused import OrthRegularizer, fused_orth_loss, init, kernel_orth_loss, schedules, srip_loss
from ocnn_fused.problem import Problem, Target, problem_of
from ocnn_fused.regularizer import steering

pytestmark = [
    pytest.mark.filterwarnings("ignore:no orthogonal convolution exists"),
    pytest.mark.filterwarnings("ignore:the orthogonality loss explodes"),
]


@pytest.fixture(autouse=True)
def _setup() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network() -> nn.Sequential:
    """A square layer, one with stride, one with more filters than channels, one with groups."""
    return nn.Sequential(
        nn.Conv2d(6, 6, 3, bias=False),
        nn.Conv2d(6, 12, 3, 2, bias=False),
        nn.Conv2d(12, 16, 1, bias=False),
        nn.Conv2d(16, 8, 3, groups=2, bias=False),
    )


class Pull:
    """A task that pulls every weight towards a place that is far from orthogonal."""

    def __init__(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        self.places = []
        for weight in self.weights:
            uneven = 1 + 2 * torch.rand(weight.shape[0], *[1] * (weight.dim() - 1), generator=generator)
            length = 2 / math.sqrt(weight[0].numel())
            self.places.append(length * uneven * torch.randn(weight.shape, generator=generator))

    def __call__(self) -> Tensor:
        pairs = zip(self.weights, self.places, strict=True)
        return 0.02 * sum((weight - place).square().sum() for weight, place in pairs)


def train(model: nn.Module, reg: OrthRegularizer, steps: int, direct: bool = False) -> None:
    task = Pull(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (task() if direct else task() + reg()).backward()
        if direct:
            reg.add_grad_()
        optimizer.step()
        reg.step()


def start_at(reg: OrthRegularizer, value: float) -> None:
    state = reg.state_dict()
    state["lambda"] = {name: torch.tensor(value, dtype=torch.float64) for name in state["lambda"]}
    reg.load_state_dict(state)


def numbers(reg: OrthRegularizer, what: Any) -> list[float]:
    return [value.item() for value in reg.per_layer(what).values()]


# ----------------------------------------------------------------------------------------------------------------------
# The excess
# ----------------------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((8, 4, 3, 3), {}),
    "stride": ((8, 4, 3, 3), {"stride": 2}),
    "dilation and stride": ((6, 4, 5), {"stride": 2, "dilation": 3}),
    "rows than columns": ((16, 8, 1, 1), {}),
    "linear": ((12, 5), {}),
    "depthwise": ((4, 1, 3, 3), {"groups": 4}),
    "one tap each": ((4, 1, 1, 1), {"groups": 4}),
    "groups": ((6, 3, 5), {"stride": 3, "groups": 2}),
    "kernel": ((8, 4, 3, 3), {"padding": 0}),
    "target": ((8, 4, 3, 3), {"target": 0.5}),
    "off-diagonal": ((8, 4, 3, 3), {"part": "off_diagonal"}),
}


def problem(shape: tuple[int, ...], stride: int = 1, dilation: int = 1, groups: int = 1, padding: int | None = None,
            target: Target = 1, part: str = "all") -> Problem:  # fmt: skip
    return problem_of(shape, stride, dilation, groups, padding, target, part)


@pytest.mark.parametrize("name", SHAPES)
def test_random_filters_have_an_excess_of_one(name: str) -> None:
    """Against the mean over weights drawn as the definition says."""
    shape, options = SHAPES[name]
    asked = problem(shape, **options)
    deviation = math.sqrt(options.get("target", 1) / math.prod(shape[1:]))
    losses = torch.stack(
        [fused_orth_loss(deviation * torch.randn(shape, dtype=torch.float64), **options) for _ in range(1500)]
    )
    error = losses.std().item() / math.sqrt(len(losses))
    assert losses.mean().item() - steering.least(asked) == pytest.approx(
        steering.random_excess(asked), abs=4 * error, rel=0
    )
    assert error < 0.06 * steering.random_excess(asked)


def test_free_targets_are_measured_at_their_own_scale() -> None:
    """Wide enough that the mean of a quotient is the quotient of the means."""
    for shape, scale in (((64, 32, 3, 3), 1.0), ((96, 48, 1, 1), 0.1), ((32, 64, 3, 3), 5.0)):
        layer = nn.Conv2d(shape[1], shape[0], shape[2], bias=False)
        reg = OrthRegularizer(layer, "auto", target="free")
        excesses = []
        for _ in range(10):
            nn.init.normal_(layer.weight, std=scale / math.sqrt(math.prod(shape[1:])))
            excesses += numbers(reg, "excess")
        assert sum(excesses) / 10 == pytest.approx(1, abs=0.02)
    init.orthogonal_(layer.weight)
    layer.weight.data.mul_(scale)
    assert numbers(reg, "excess") == pytest.approx([0], abs=1e-5)


@pytest.mark.parametrize("options", [{"target": "free"}, {"part": "off_diagonal"}], ids=str)
def test_a_loss_that_is_always_zero_has_no_excess(options: dict[str, Any]) -> None:
    """One tap for one channel: there is nothing that could be orthogonal to anything."""
    model = nn.Conv2d(4, 4, 1, groups=4, bias=False)
    reg = OrthRegularizer(model, "auto", **options)
    reg().backward()
    assert numbers(reg, "excess") == [0]
    assert steering.LEAST < numbers(reg, "lambda")[0] < steering.START


def test_a_large_random_matrix_has_a_spectral_excess_of_one() -> None:
    for shape in ((128, 512), (512, 256), (300, 300)):
        weight = torch.randn(shape) / math.sqrt(shape[1])
        loss = srip_loss(weight, power_iterations=200).item()
        assert loss == pytest.approx(steering.random_spectral_excess(problem(shape)), rel=0.1)


def test_orthogonal_layers_have_none() -> None:
    model = network()
    for layer in model:
        init.orthogonal_(layer.weight, layer.stride, groups=layer.groups)
    assert numbers(OrthRegularizer(model), "excess") == pytest.approx([0] * 4, abs=1e-5)


def test_excess_of_each_method() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto", method={"0": "srip", "1": "kernel"})
    excess = reg.per_layer("excess")
    wanted = [problem((6, 6, 3, 3)), problem((12, 6, 3, 3), 2, padding=0), problem((16, 12, 1, 1))]
    losses = [srip_loss(model[0].weight), kernel_orth_loss(model[1].weight), fused_orth_loss(model[2].weight)]
    units = [steering.random_spectral_excess(wanted[0]), *map(steering.random_excess, wanted[1:])]
    least = [0.0, 0.0, 4.0]
    for name, loss, unit, bound in zip("012", losses, units, least, strict=True):
        assert excess[name].item() == pytest.approx((loss.item() - bound) / unit, rel=1e-4)
    counted = OrthRegularizer(model, "auto", normalize="excess").per_layer("excess")["2"]
    assert counted.item() == pytest.approx(excess["2"].item(), rel=1e-4)
    with pytest.raises(ValueError, match="what='excess' needs squared=True"):
        OrthRegularizer(model, squared=False).per_layer("excess")
    with pytest.raises(ValueError, match="what must be one of 'loss', 'excess', 'lambda', got 'weight'"):
        reg.per_layer("weight")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# Where lambdas arrive
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"tolerance": 0.3}, {"method": "kernel", "tolerance": 2.0}, {"every": 3}, {"method": {"1": "kernel"}}],
    ids=str,
)
def test_excess_reaches_the_tolerance_from_any_lambda(options: dict[str, Any]) -> None:
    """Over six decades, and at the end it is one and the same lambda."""
    start, found = network(), []
    for first in (1e-6, 1e-3, 1.0):
        model = copy.deepcopy(start)
        reg = OrthRegularizer(model, "auto", **options)
        start_at(reg, first)
        train(model, reg, 2400)
        assert numbers(reg, "excess") == pytest.approx([options.get("tolerance", 1.0)] * 4, rel=0.02)
        found.append(numbers(reg, "lambda"))
    assert found[0] == pytest.approx(found[1], rel=0.05)
    assert found[2] == pytest.approx(found[1], rel=0.05)


def test_a_free_target_reaches_the_tolerance() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto", target="free", tolerance=0.5)
    train(model, reg, 2400)
    assert max(numbers(reg, "excess")) == pytest.approx(0.5, rel=0.1)


def test_a_layer_within_its_tolerance_is_left_to_the_task() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto", tolerance=1e6)
    train(model, reg, 1200)
    assert numbers(reg, "lambda") == [steering.LEAST] * 4


def test_lambda_gives_way_to_weights_that_are_too_large() -> None:
    """The loss grows with the fourth power of the weights: at no size does a step overshoot."""
    for scale in (3.0, 30.0, 300.0):
        model = nn.Conv2d(6, 6, 3, bias=False)
        model.weight.data.mul_(scale)
        reg = OrthRegularizer(model, "auto")
        start_at(reg, 1e-6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        sizes = []
        for _ in range(1500):
            optimizer.zero_grad()
            reg().backward()
            optimizer.step()
            sizes.append(model.weight.detach().norm().item())
        assert max(sizes) <= 1.5 * sizes[0]
        assert numbers(reg, "excess")[0] <= 1


def test_losses_that_are_not_finite_leave_lambda_alone() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto")
    reg()
    before, saved = numbers(reg, "lambda"), model[1].weight.detach().clone()
    model[1].weight.data[0, 0, 0, 0] = math.nan
    model[2].weight.data[0, 0] = math.inf
    with pytest.warns(UserWarning, match="holds NaN or inf"):
        reg()
    after = numbers(reg, "lambda")
    assert after[1] == before[1]
    assert all(0 < value < 1 for value in after)
    model[1].weight.data.copy_(saved)
    reg()
    assert numbers(reg, "lambda")[1] != before[1] or numbers(reg, "excess")[1] == 1


# ----------------------------------------------------------------------------------------------------------------------
# What a call is
# ----------------------------------------------------------------------------------------------------------------------


def test_the_value_is_that_of_the_lambdas_shown() -> None:
    model = network()
    reg = OrthRegularizer(model, {"0": "auto", "1": 0.5, "2": "auto", "3": "auto"}, normalize="excess")
    train(model, reg, 20)
    lambdas, losses = reg.per_layer("lambda"), reg.per_layer()
    assert lambdas["1"].item() == 0.5
    expected = sum(lambdas[name].item() * losses[name].item() for name in lambdas)
    assert reg().item() == pytest.approx(expected, rel=1e-5)


def test_add_grad_and_the_loss_agree() -> None:
    """Gradients and lambdas, step by step; a computed weight goes through autograd in both."""
    results = []
    for direct in (False, True):
        torch.manual_seed(0)
        model = network().double()
        parametrizations.weight_norm(model[1])
        reg = OrthRegularizer(model, "auto", method={"2": "srip", "*": "conv"})
        train(model, reg, 30, direct)
        results.append((reg.state_dict(), list(model.parameters())))
    (state, weights), (direct_state, direct_weights) = results
    for name in "0123":
        assert direct_state["lambda"][name].item() == pytest.approx(state["lambda"][name].item(), rel=1e-12)
        assert state["lambda"][name].item() != steering.START
    for weight, other in zip(weights, direct_weights, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-10, atol=1e-12)


def test_calls_at_the_same_weights_count_once() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto")
    with torch.no_grad():
        reg()
    assert numbers(reg, "lambda") == [steering.START] * 4  # no step of a training
    reg().backward()
    once = numbers(reg, "lambda")
    assert steering.START not in once
    for again in (reg, reg.add_grad_, reg.per_layer):
        again()
        assert numbers(reg, "lambda") == once
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    reg()
    assert [value != before for value, before in zip(numbers(reg, "lambda"), once, strict=True)] == [
        True, False, False, False,
    ]  # fmt: skip


def test_backward_uses_the_lambdas_of_its_own_call() -> None:
    model = network().double()
    reg = OrthRegularizer(model, "auto")
    lambdas = reg.per_layer("lambda")
    first = reg()
    for _ in range(3):
        model[1].weight.data.mul_(0.9)  # autograd does not see it
        reg()
    assert steering.START not in numbers(reg, "lambda")
    (gradient,) = torch.autograd.grad(first, model[0].weight, create_graph=True)
    (expected,) = torch.autograd.grad(fused_orth_loss(model[0].weight), model[0].weight, create_graph=True)
    torch.testing.assert_close(gradient, lambdas["0"] * expected)
    (second,) = torch.autograd.grad(gradient.square().sum(), model[0].weight)
    (expected,) = torch.autograd.grad(expected.square().sum(), model[0].weight)
    torch.testing.assert_close(second, lambdas["0"] ** 2 * expected)


def test_a_schedule_multiplies_lambda() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto", schedule=schedules.Warmup(10))
    assert reg().item() == 0
    assert numbers(reg, "lambda") == [steering.START] * 4  # nothing was learnt from it
    for _ in range(5):
        reg.step()
    value = reg().item()
    assert value == pytest.approx(0.5 * steering.START * sum(numbers(reg, "loss")), rel=1e-5)


def test_steering_does_not_move_in_memory() -> None:
    """What a CUDA graph has recorded is read and written at every replay."""
    model = network()
    reg = OrthRegularizer(model, "auto")
    (lambdas,) = reg._look()[0].lambdas.values()
    places = [lambdas.values.data_ptr(), lambdas.excess.data_ptr()]
    train(model, reg, 3)
    reg.load_state_dict(reg.state_dict())
    assert [lambdas.values.data_ptr(), lambdas.excess.data_ptr()] == places
    assert [*reg._look()[0].lambdas.values()] == [lambdas]
    coefficients = reg._look()[0].bundles((0, 1, 2, 3))[0].weighting
    before = coefficients.factors.clone()
    train(model, reg, 3)
    assert torch.equal(coefficients.factors, before)


@pytest.mark.parametrize("method", ["conv", "kernel", {"0": "srip"}], ids=str)
def test_compiled_training(method: Any) -> None:
    """One graph, compiled once, and the lambdas of the training without it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = network()
        reg = OrthRegularizer(model, "auto", method=method)
        task, counter = Pull(model), CompileCounterWithBackend("aot_eager")

        def loss(task: Pull = task, reg: OrthRegularizer = reg) -> Tensor:
            return task() + reg()

        run: Callable[[], Tensor] = torch.compile(loss, backend=counter, fullgraph=True) if compiled else loss
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for _ in range(8):
            optimizer.zero_grad()
            run().backward()
            optimizer.step()
        results.append(numbers(reg, "lambda"))
        assert counter.frame_count == compiled
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    assert steering.START not in results[0]


# ----------------------------------------------------------------------------------------------------------------------
# State
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_training_goes_on_with_the_same_bits(way: str) -> None:
    model = network()
    reg = OrthRegularizer(model, "auto", tolerance=0.5)
    train(model, reg, 25)
    buffer = io.BytesIO()
    torch.save(reg.state_dict(), buffer)
    buffer.seek(0)
    again = copy.deepcopy(model)
    if way == "deepcopy":
        other = copy.deepcopy(reg)
        other.model = again
    else:
        other = OrthRegularizer(again, "auto", tolerance=0.5)
        other.load_state_dict(torch.load(buffer, weights_only=True))
    saved = numbers(reg, "lambda")
    train(model, reg, 25)
    assert numbers(other, "lambda") == saved
    train(again, other, 25)
    assert numbers(other, "lambda") == numbers(reg, "lambda")
    for weight, expected in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_state_that_does_not_fit() -> None:
    state = OrthRegularizer(network(), "auto").state_dict()
    fixed = OrthRegularizer(network())
    with pytest.raises(ValueError, match=r"state has lambdas of the layers 0, 1, 2, 3, but .* steers are \(none\)"):
        fixed.load_state_dict(state)
    with pytest.raises(ValueError, match=r"steers are 0, 2, 3"):
        OrthRegularizer(network(), {"1": 0.1, "*": "auto"}).load_state_dict(state)
    del state["excess"]
    with pytest.raises(ValueError, match="must have the keys 'steps' and 'schedule'"):
        OrthRegularizer(network(), "auto").load_state_dict(state)
    reg = OrthRegularizer(network(), "auto")
    reg.refresh()
    start_at(reg, 0.2)
    reg.load_state_dict(fixed.state_dict())  # as the Trainer's mixin does at every step
    assert numbers(reg, "lambda") == [0.2] * 4


def test_lambdas_outlive_changes_of_the_model() -> None:
    model = network()
    reg = OrthRegularizer(model, "auto")
    start_at(reg, 0.02)
    model[1] = nn.Conv2d(6, 12, 5, bias=False)
    assert numbers(reg, "lambda") == [0.02] * 4
    reg.refresh()
    reg.tolerance = 0.5
    model.double()
    assert numbers(reg, "lambda") == [0.02] * 4
    reg.weight = 0.5
    assert numbers(reg, "lambda") == [0.5] * 4
    assert "lambda" not in reg.state_dict()


# ----------------------------------------------------------------------------------------------------------------------
# Arguments, and what people see
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"weight": "automatic"}, TypeError, "weight must be a float, 'auto', a callable"),
        ({"weight": {"0": "automatic"}}, TypeError, r"weight\['0'\] must be a float, 'auto'"),
        ({"weight": "auto", "tolerance": 0}, ValueError, "tolerance must be positive and finite, got 0"),
        ({"weight": "auto", "tolerance": math.inf}, ValueError, "tolerance must be positive and finite, got inf"),
        ({"weight": "auto", "tolerance": "small"}, TypeError, "tolerance must be a float, got 'small'"),
        ({"weight": "auto", "tolerance": True}, TypeError, "tolerance must be a float, got True"),
        ({"weight": "auto", "squared": False}, ValueError, "squared must be True with weight 'auto'"),
        ({"weight": {"*": "auto"}, "normalize": "numel"}, ValueError, "normalize must not be 'numel' with weight"),
        ({"weight": lambda name, module: "auto", "squared": False}, ValueError, "squared must be True with weight"),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        OrthRegularizer(network(), **options)


def test_table_shows_lambda_and_excess() -> None:
    model = network()
    reg = OrthRegularizer(model, lambda name, module: 0.5 if name == "1" else "auto", tolerance=2.0)
    rows = {line.split()[0]: line for line in str(reg).splitlines()}
    assert rows["layer"].endswith("excess")
    assert rows["0"].endswith("-")
    train(model, reg, 3)
    excess = reg._look()[0].known()["0"][1].item()
    assert excess == pytest.approx(numbers(reg, "excess")[0], rel=0.2)
    rows = {line.split()[0]: line for line in str(reg).splitlines()}
    assert rows["0"].endswith(f"{excess:.3g} of 2")
    assert f"{numbers(reg, 'lambda')[0]:.3g} now" in rows["0"]
    assert rows["1"].split()[-3:] == ["0.5", "0", "-"]
    assert "tolerance 2" in str(reg)
    assert repr(OrthRegularizer(model, "auto")) == "OrthRegularizer(Sequential, weight='auto', method='conv')"
    assert "excess" not in str(OrthRegularizer(model))
