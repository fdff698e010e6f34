"""Gradients under saved-tensor hooks: where a saved tensor is unpacked as a copy, they still reach the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from conftest import BACKENDS
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ocnn_fused import OrthRegularizer, fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss


@contextmanager
def copies() -> Iterator[None]:
    with saved_tensors_hooks(torch.clone, torch.clone):
        yield


HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"save_on_cpu": save_on_cpu, "copies": copies}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.Conv2d(12, 4, 1))


REGULARIZERS: dict[str, dict[str, Any]] = {
    **{f"method {method}": {"method": method} for method in ("conv", "kernel", "srip")},
    **{f"normalize {normalize}": {"normalize": normalize} for normalize in ("numel", "excess")},
    "free target": {"target": "free"},
    "off-diagonal": {"part": "off_diagonal"},
    "not squared": {"squared": False},
}
FUNCTIONS: dict[str, Callable[[nn.Sequential], Tensor]] = {
    "fused_orth_loss": lambda model: fused_orth_loss(model[2].weight, 2),
    "kernel_orth_loss": lambda model: kernel_orth_loss(model[0].weight, squared=False),
    "foreach": lambda model: fused_orth_loss_foreach([model[0].weight, model[2].weight], [1, 2]).sum(),
}


def losses(backend: str) -> Iterator[Any]:
    for name, options in REGULARIZERS.items():
        make = lambda model, options=options: OrthRegularizer(  # noqa: E731
            model, weight=0.5, include=nn.Conv2d, backend=backend, **options
        )()
        yield pytest.param(make, id=f"{name}-{backend}")
    if backend == "cpu":
        yield from (pytest.param(function, id=name) for name, function in FUNCTIONS.items())


def grads_of(model: nn.Module, backward: Callable[[nn.Module], None]) -> list[Tensor | None]:
    model.zero_grad()
    backward(model)
    return [parameter.grad for parameter in model.parameters()]


def check(actual: list[Tensor | None], expected: list[Tensor | None], times: float = 1) -> None:
    assert any(grad is not None and grad.any() for grad in expected)
    for one, other in zip(actual, expected, strict=True):
        if other is None:
            assert one is None or not one.any()
        else:
            assert one is not None
            assert torch.allclose(one, times * other, rtol=1e-5, atol=1e-7)


EVERY = [case for backend in BACKENDS if backend in ("cpu", "torch") for case in losses(backend)]


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("loss", EVERY)
def test_gradients_arrive(loss: Callable[[nn.Module], Tensor], hooks: Callable[[], Any]) -> None:
    model = model_of()
    expected = grads_of(model, lambda model: loss(model).backward())

    def under_hooks(model: nn.Module) -> None:
        with hooks():
            value = loss(model)
        value.backward()

    check(grads_of(model, under_hooks), expected)


@pytest.mark.parametrize("loss", EVERY)
def test_gradients_arrive_twice_where_the_graph_is_kept(loss: Callable[[nn.Module], Tensor]) -> None:
    model = model_of()
    expected = grads_of(model, lambda model: loss(model).backward())

    def twice(model: nn.Module) -> None:
        with save_on_cpu():
            value = loss(model)
        value.backward(retain_graph=True)
        value.backward()

    check(grads_of(model, twice), expected, times=2)


@pytest.mark.parametrize("loss", EVERY)
def test_gradients_arrive_through_checkpoint(loss: Callable[[nn.Module], Tensor]) -> None:
    model, x = model_of(), torch.randn(2, 8, 9, 9, requires_grad=True)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() + loss(model)

    expected = grads_of(model, lambda model: step(model, x).backward())
    actual = grads_of(model, lambda model: checkpoint(step, model, x, use_reentrant=False).backward())
    check(actual, expected)


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_whole_training_steps_are_the_same(hooks: Callable[[], Any]) -> None:
    """The regulariser alone: without its gradient the weights would not move."""

    def trained(context: Callable[[], Any] | None) -> list[Tensor]:
        model = model_of()
        reg = OrthRegularizer(model, weight=0.5, include=nn.Conv2d)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            if context is None:
                reg().backward()
            else:
                with context():
                    reg().backward()
            optimizer.step()
            reg.step()
        return [parameter.detach() for parameter in model.parameters()]

    start = [parameter.detach() for parameter in model_of().parameters()]
    for before, plain, hooked in zip(start, trained(None), trained(hooks), strict=True):
        assert torch.equal(plain, hooked)
        assert before.dim() == 1 or not torch.equal(before, plain)
