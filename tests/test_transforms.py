"""Every way in which PyTorch differentiates, against the same way through the definition in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from oracle import Case
from torch import Tensor, func

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach, reference

Loss = Callable[[Tensor], Tensor]

CASES = [Case((4, 3, 3)), Case((3, 2, 2, 3), stride=(1, 2)), Case((6, 2, 2), groups=2), Case((3, 4))]


def weight_of(case: Case, seed: int = 0) -> Tensor:
    return case.random(seed)


def tangent_of(case: Case) -> Tensor:
    return case.random(7)


def batch_of(case: Case) -> Tensor:
    return torch.stack([case.random(seed) for seed in range(3)])


# Each takes a loss of one weight and returns a derivative of it.


def backward(loss: Loss, case: Case) -> Tensor:
    weight = weight_of(case).requires_grad_()
    return torch.autograd.grad(loss(weight), weight)[0]


def second_backward(loss: Loss, case: Case) -> Tensor:
    weight = weight_of(case).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    return torch.autograd.grad((gradient * tangent_of(case)).sum(), weight)[0]


def third_backward(loss: Loss, case: Case) -> Tensor:
    weight = weight_of(case).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    (second,) = torch.autograd.grad((gradient * tangent_of(case)).sum(), weight, create_graph=True)
    return torch.autograd.grad((second * tangent_of(case)).sum(), weight)[0]


def dual(loss: Loss, case: Case) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(weight_of(case), tangent_of(case)))).tangent


def forward_over_backward(loss: Loss, case: Case) -> Tensor:
    weight = weight_of(case).requires_grad_()
    with forward_ad.dual_level():
        value = loss(forward_ad.make_dual(weight, tangent_of(case)))
        (gradient,) = torch.autograd.grad(value, weight, create_graph=True)
        return forward_ad.unpack_dual(gradient).tangent


def backward_over_forward(loss: Loss, case: Case) -> Tensor:
    weight = weight_of(case).requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(loss(forward_ad.make_dual(weight, tangent_of(case)))).tangent
        return torch.autograd.grad(tangent, weight)[0]


def second_order_in_levels(outer: Callable[..., Loss], inner: Callable[..., Loss]) -> Callable[[Loss, Case], Tensor]:
    return lambda loss, case: outer(inner(loss))(weight_of(case))


WAYS: dict[str, Callable[[Loss, Case], Tensor]] = {
    "backward": backward,
    "second backward": second_backward,
    "third backward": third_backward,
    "dual": dual,
    "forward over backward": forward_over_backward,
    "backward over forward": backward_over_forward,
    "grad": lambda loss, case: func.grad(loss)(weight_of(case)),
    "vmap": lambda loss, case: func.vmap(loss)(batch_of(case)),
    "vmap last": lambda loss, case: func.vmap(loss, in_dims=-1)(batch_of(case).movedim(0, -1)),
    "vmap grad": lambda loss, case: func.vmap(func.grad(loss))(batch_of(case)),
    "grad of vmap": lambda loss, case: func.grad(lambda batch: func.vmap(loss)(batch).sum())(batch_of(case)),
    "jvp": lambda loss, case: func.jvp(loss, (weight_of(case),), (tangent_of(case),))[1],
    "vmap jvp": lambda loss, case: func.vmap(lambda w, t: func.jvp(loss, (w,), (t,))[1])(
        batch_of(case), batch_of(case).flip(0)
    ),
    "vjp": lambda loss, case: func.vjp(loss, weight_of(case))[1](torch.tensor(-2.0).double())[0],
    "linearize": lambda loss, case: func.linearize(loss, weight_of(case))[1](tangent_of(case)),
    "jacfwd": lambda loss, case: func.jacfwd(loss)(weight_of(case)),
    "jacrev": lambda loss, case: func.jacrev(loss)(weight_of(case)),
    "hessian": lambda loss, case: func.hessian(loss)(weight_of(case)),
    "jacrev of jacrev": second_order_in_levels(func.jacrev, func.jacrev),
    "jacfwd of jacfwd": second_order_in_levels(func.jacfwd, func.jacfwd),
    "jacrev of jacfwd": second_order_in_levels(func.jacrev, func.jacfwd),
    "jvp of grad": lambda loss, case: func.jvp(func.grad(loss), (weight_of(case),), (tangent_of(case),))[1],
    "vjp of grad": lambda loss, case: func.vjp(func.grad(loss), weight_of(case))[1](tangent_of(case))[0],
    "grad of grad": lambda loss, case: func.grad(lambda w: (func.grad(loss)(w) * tangent_of(case)).sum())(
        weight_of(case)
    ),
    "vmap of jvp of grad": lambda loss, case: func.vmap(lambda w, t: func.jvp(func.grad(loss), (w,), (t,))[1])(
        batch_of(case), batch_of(case).flip(0)
    ),
    "jacfwd of grad": second_order_in_levels(func.jacfwd, func.grad),
    "jacrev of grad": second_order_in_levels(func.jacrev, func.grad),
    "third order": lambda loss, case: func.jacfwd(func.jacrev(func.grad(loss)))(weight_of(case)),
    "functional jacobian": lambda loss, case: torch.autograd.functional.jacobian(loss, weight_of(case)),
    "functional jacobian, vectorized": lambda loss, case: torch.autograd.functional.jacobian(
        loss, weight_of(case), vectorize=True
    ),
    "functional jacobian, forward": lambda loss, case: torch.autograd.functional.jacobian(
        loss, weight_of(case), vectorize=True, strategy="forward-mode"
    ),
    "functional hessian": lambda loss, case: torch.autograd.functional.hessian(loss, weight_of(case), vectorize=True),
    "functional hessian, forward": lambda loss, case: torch.autograd.functional.hessian(
        loss, weight_of(case), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "functional hvp": lambda loss, case: torch.autograd.functional.hvp(loss, weight_of(case), tangent_of(case))[1],
}


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


COMPILED: dict[str, Callable[[Loss, Case], Tensor]] = {
    "compiled backward": lambda loss, case: backward(compiled(loss), case),
    "compiled grad": lambda loss, case: compiled(func.grad(loss))(weight_of(case)),
    "compiled vmap": lambda loss, case: compiled(func.vmap(loss))(batch_of(case)),
    "compiled vmap grad": lambda loss, case: compiled(func.vmap(func.grad(loss)))(batch_of(case)),
    "compiled jvp": lambda loss, case: compiled(lambda w, t: func.jvp(loss, (w,), (t,))[1])(
        weight_of(case), tangent_of(case)
    ),
    "compiled jacrev": lambda loss, case: compiled(func.jacrev(loss))(weight_of(case)),
    "compiled jacfwd": lambda loss, case: compiled(func.jacfwd(loss))(weight_of(case)),
    "compiled hessian": lambda loss, case: compiled(func.hessian(loss))(weight_of(case)),
}


def losses(case: Case, backend: str) -> tuple[Loss, Loss]:
    """A function of one weight that uses the loss, and the same by the reference formula."""

    def fused(weight: Tensor) -> Tensor:
        return fused_orth_loss(weight, **case.options, backend=backend)

    return fused, lambda weight: reference.orth_loss(weight, **case.options)


def losses_of_list(case: Case, backend: str) -> tuple[Loss, Loss]:
    """The same for a list in which the weight occurs as it is, computed from, and constant."""
    constant = case.random(9)
    names = {"strides": case.stride, "dilations": case.dilation, "groups": case.groups, "paddings": case.padding}
    options = {name: [value] * 3 for name, value in names.items()}

    def fused(weight: Tensor) -> Tensor:
        listed = fused_orth_loss_foreach([weight, 0.5 * weight.sin(), constant], **options, backend=backend)
        return (listed * listed.new_tensor([1.0, -2.0, 3.0])).sum()

    def expected(weight: Tensor) -> Tensor:
        first, second, third = (
            reference.orth_loss(one, **case.options) for one in (weight, 0.5 * weight.sin(), constant)
        )
        return first - 2 * second + 3 * third

    return fused, expected


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Attempted to insert a get_attr")


@pytest.mark.parametrize("pair", [losses, losses_of_list])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_eager(way: str, case: Case, pair: Callable[[Case, str], tuple[Loss, Loss]], backend: str) -> None:
    fused, expected = pair(case, backend)
    torch.testing.assert_close(WAYS[way](fused, case), WAYS[way](expected, case), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pair", [losses, losses_of_list])
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_compiled(way: str, case: Case, pair: Callable[[Case, str], tuple[Loss, Loss]], backend: str) -> None:
    torch.compiler.reset()
    fused, expected = pair(case, backend)
    plain = {"compiled backward": "backward"}.get(way, way.removeprefix("compiled "))
    torch.testing.assert_close(COMPILED[way](fused, case), WAYS[plain](expected, case), rtol=1e-9, atol=1e-9)


def test_first_derivatives_do_not_compute_the_reference(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Only a second derivative needs it, and only then."""
    asked: list[str] = []
    for name in ("loss_of", "grad_of", "hessian_product"):
        original = getattr(reference, name)

        def spy(*arguments: object, name: str = name, original: Callable[..., Tensor] = original, **options: object):
            asked.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(reference, name, spy)
    case = CASES[0]
    fused, _ = losses(case, backend)
    for way in ("backward", "dual", "grad", "vmap", "vmap grad", "jvp", "vjp", "jacfwd", "jacrev"):
        WAYS[way](fused, case)
    assert not asked
    WAYS["hessian"](fused, case)
    assert set(asked) == {"hessian_product"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_derivatives(dtype: torch.dtype, backend: str) -> None:
    """Loss and tangent are float32, the gradient is the weight's, and second derivatives too."""
    case = CASES[0]
    weight, tangent = weight_of(case).to(dtype), tangent_of(case).to(dtype)
    fused, _ = losses(case, backend)
    value, along = func.jvp(fused, (weight,), (tangent,))
    assert (value.dtype, along.dtype) == (torch.float32, torch.float32)
    expected = func.jvp(lambda w: reference.orth_loss(w), (weight.double(),), (tangent.double(),))[1]
    torch.testing.assert_close(along.double(), expected, rtol=5e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert func.grad(fused)(weight).dtype == dtype
    assert func.hessian(fused)(weight).dtype == dtype
