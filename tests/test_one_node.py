"""``reg()`` is one node: its gradients carry lambda, and reach ``.grad`` as autograd's own would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import kernels_run
from oracle import Case, loss_and_grad
from torch import nn

from ocnn_fused import OrthRegularizer, fused_orth_loss, schedules

BACKENDS = ("cpu", "torch", "triton")


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(5, 8, 3, padding=1), nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(2)).to(dtype)


def weights_of(model: nn.Module) -> list[nn.Parameter]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]


def task(model: nn.Module) -> torch.Tensor:
    like = next(model.parameters())
    x = torch.linspace(-1, 1, 2 * 5 * 6 * 6, dtype=like.dtype).reshape(2, 5, 6, 6)
    return model(x).square().sum()


def expected_grads(model: nn.Module, factors: list[float]) -> list[torch.Tensor]:
    """Of the definition in float64."""
    strides = (1, 2, 1)
    return [
        factor * torch.from_numpy(loss_and_grad(weight.detach(), Case(tuple(weight.shape), stride=stride))[1])
        for weight, stride, factor in zip(weights_of(model), strides, factors, strict=True)
    ]


def check(model: nn.Module, start: list[torch.Tensor], factors: list[float], tolerance: float = 3e-5) -> None:
    for weight, before, grad in zip(weights_of(model), start, expected_grads(model, factors), strict=True):
        assert weight.grad is not None
        difference = weight.grad.double() - before.double() - grad
        assert difference.abs().max() <= tolerance * (1 + weight.grad.abs().max())


def task_grads(model: nn.Module) -> list[torch.Tensor]:
    task(model).backward()
    grads = [weight.grad.clone() for weight in weights_of(model)]  # type: ignore[union-attr]
    model.zero_grad()
    return grads


@pytest.fixture
def model() -> nn.Sequential:
    made = model_of()
    task(made)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_and_gradient_have_the_factors(model: nn.Sequential, backend: str) -> None:
    lambdas = {"0": 0.5, "1": 0.25, "2": 2.0}
    reg = OrthRegularizer(
        model, weight=lambdas, normalize="numel", schedule=schedules.Constant(0.5), backend=backend, precision="ieee"
    )
    factors = [0.5 * value / weight.numel() for value, weight in zip(lambdas.values(), weights_of(model), strict=True)]
    start = task_grads(model)
    with kernels_run(backend):
        value = reg()
        per_layer = reg.per_layer()
        (value + task(model)).backward()
    assert value.item() == pytest.approx(
        sum(f * loss.item() for f, loss in zip(factors, per_layer.values(), strict=True)), rel=1e-5
    )
    check(model, start, factors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, -3.0])
def test_every_way_to_ask_for_the_gradient(model: nn.Sequential, backend: str, scale: float) -> None:
    """Alone, twice from one graph, through autograd.grad, for some of the weights, and by hooks."""
    reg = OrthRegularizer(model, weight=1.0, backend=backend, precision="ieee")
    weights = weights_of(model)
    zeros = [torch.zeros_like(weight) for weight in weights]
    with kernels_run(backend):
        (reg() * scale).backward()
        check(model, zeros, [scale] * 3)
        model.zero_grad()
        value = reg() * scale
        value.backward(retain_graph=True)
        value.backward()
        check(model, zeros, [2 * scale] * 3)
        with pytest.raises(RuntimeError, match="second time"):
            value.backward()
        model.zero_grad()
        grads = torch.autograd.grad(reg() * scale, weights)
        assert all(weight.grad is None for weight in weights)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        check(model, zeros, [scale] * 3)
        model.zero_grad()
        (reg() * scale).backward(inputs=[weights[1]])
        assert [weight.grad is None for weight in weights] == [True, False, True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["tensor", "accumulated", "collector"])
def test_hooks_see_the_whole_gradient(model: nn.Sequential, backend: str, kind: str) -> None:
    reg = OrthRegularizer(model, weight=1.0, backend=backend, precision="ieee")
    start = task_grads(model)
    weight = weights_of(model)[1]
    seen: list[torch.Tensor] = []
    if kind == "tensor":
        weight.register_hook(lambda grad: seen.append(grad.clone()))
    elif kind == "accumulated":
        weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))  # type: ignore[union-attr]
    else:
        collector = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        collector.register_hook(lambda *_: seen.append(weight.grad.clone()))  # type: ignore[union-attr]
    with kernels_run(backend):
        (reg() + task(model)).backward()
    check(model, start, [1.0] * 3)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_accumulate(model: nn.Sequential, backend: str) -> None:
    reg = OrthRegularizer(model, weight=1.0, backend=backend, precision="ieee")
    start = [2 * grad for grad in task_grads(model)]
    with kernels_run(backend):
        for _ in range(2):
            (reg() + task(model)).backward()
    check(model, start, [2.0] * 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights_and_excess(model: nn.Sequential, backend: str) -> None:
    weights = weights_of(model)
    weights[1].requires_grad_(False)
    reg = OrthRegularizer(model, weight=1.0, normalize="excess", backend=backend, precision="ieee")
    with kernels_run(backend):
        value = reg()
        value.backward()
        assert value.item() == pytest.approx(sum(loss.item() for loss in reg.per_layer().values()), rel=1e-5)
    assert weights[1].grad is None
    assert weights[0].grad is not None
    with kernels_run(backend), torch.no_grad():
        assert reg().item() == pytest.approx(value.item(), rel=1e-6)
        assert not reg().requires_grad


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_twice_differentiable(backend: str) -> None:
    model = model_of(torch.float64)
    task(model)
    reg = OrthRegularizer(model, weight={"0": 0.5, "1": 0.25, "2": 2.0}, backend=backend, include=nn.Conv2d)
    weights = weights_of(model)
    strides = (1, 2, 1)

    def total() -> torch.Tensor:
        losses = [fused_orth_loss(weight, stride) for weight, stride in zip(weights, strides, strict=True)]
        return 0.5 * losses[0] + 0.25 * losses[1] + 2 * losses[2]

    def second(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads = torch.autograd.grad(value.square(), weights, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), weights)

    for actual, expected in zip(second(reg()), second(total()), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-9)


def test_a_batch_of_scales(model: nn.Sequential) -> None:
    reg = OrthRegularizer(model, weight=1.0)
    weights, scales = weights_of(model), torch.tensor([1.0, -2.0])
    many = torch.autograd.grad(reg(), weights, scales, is_grads_batched=True)
    alone = torch.autograd.grad(reg(), weights)
    for batch, grad in zip(many, alone, strict=True):
        assert torch.allclose(batch, torch.stack([grad, -2 * grad]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_changed_weights_are_an_error(model: nn.Sequential, backend: str) -> None:
    reg = OrthRegularizer(model, backend=backend, precision="ieee")
    with kernels_run(backend):
        value = reg()
    with torch.no_grad():
        weights_of(model)[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.parametrize("step", ["reg", "add_grad_"])
def test_mixed_dtypes(step: str) -> None:
    model = model_of()
    task(model)
    weights_of(model)[1].data = weights_of(model)[1].data.double()
    reg = OrthRegularizer(model, weight=1.0)
    if step == "reg":
        value = reg()
        assert value.dtype == torch.float64
        value.backward()
    else:
        reg.add_grad_()
    check(model, [torch.zeros_like(weight) for weight in weights_of(model)], [1.0] * 3)
    assert [weight.grad.dtype for weight in weights_of(model)] == [torch.float32, torch.float64, torch.float32]  # type: ignore[union-attr]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, 0.5, torch.tensor(4.0)], ids=str)
def test_add_grad_adds_where_gradients_are_and_makes_those_that_are_not(
    model: nn.Sequential, backend: str, scale: float | torch.Tensor
) -> None:
    reg = OrthRegularizer(model, weight={"0": 0.5, "1": 0.25, "2": 2.0}, backend=backend, precision="ieee")
    start = task_grads(model)
    weights = weights_of(model)
    weights[0].grad, weights[2].grad = start[0].clone(), start[2].clone()
    kept = weights[0].grad
    with kernels_run(backend):
        reg.add_grad_(scale)
    assert weights[0].grad is kept
    start[1] = torch.zeros_like(start[1])
    check(model, start, [value * float(scale) for value in (0.5, 0.25, 2.0)])


def test_streams_of_steps_agree(model: nn.Sequential) -> None:
    """Ten steps with reg() in the loss and ten with add_grad_() lead to the same place."""

    def train(step: Callable[[OrthRegularizer, nn.Module], None]) -> list[torch.Tensor]:
        trained = model_of()
        task(trained)
        reg = OrthRegularizer(trained, weight=0.1, schedule=schedules.Warmup(5))
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            step(reg, trained)
            optimizer.step()
            reg.step()
        return [weight.detach() for weight in weights_of(trained)]

    def in_loss(reg: OrthRegularizer, trained: nn.Module) -> None:
        (task(trained) + reg()).backward()

    def added(reg: OrthRegularizer, trained: nn.Module) -> None:
        task(trained).backward()
        reg.add_grad_()

    for one, other in zip(train(in_loss), train(added), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_graph_of_the_backward_where_lambda_is_zero(backend: str) -> None:
    """As at the start of a warm-up, with a gradient penalty."""
    model = model_of(torch.float64)
    reg = OrthRegularizer(model, schedule=lambda step: 0.0, include=nn.Conv2d, backend=backend)
    grads = torch.autograd.grad(reg(), weights_of(model), create_graph=True, materialize_grads=True)
    sum(grad.square().sum() for grad in grads).backward()
    for weight, grad in zip(weights_of(model), grads, strict=True):
        assert not grad.any()
        assert weight.grad is None or not weight.grad.any()
