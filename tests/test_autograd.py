"""The loss as a citizen of autograd, torch.compile, autocast and the dispatcher."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from conftest import TOLERANCES, assert_matches_definition, fused
from oracle import Case, dirac, from_numpy, loss_and_grad
from plans import problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach, reference
from ocnn_fused.problem import Flat, Options, flatten, flatten_problems

TIGHT = TOLERANCES[torch.float64]
CASE = Case((6, 4, 3, 3))
CASES = (
    Case((4, 3)),
    Case((4, 3, 4), stride=2),
    Case((3, 2, 3, 3)),
    Case((5, 1, 3, 3), stride=2),
    Case((4, 2, 2, 3), dilation=2, groups=2),
    Case((4, 2, 3, 3), dilation=2, padding=2),
    Case((3, 2, 2, 1, 2)),
    Case((5, 1, 3), groups=5),
)
#: Large enough for matrix products, which the cases above are not.
LARGER = (
    Case((20, 18, 3, 3)),
    Case((40, 3, 7, 7), stride=2),
    Case((24, 20, 4), stride=2),
    Case((30, 40)),
    Case((12, 13, 7)),
)


class Recorder(TorchDispatchMode):
    """Names of the ops of this package that ran, and a refusal of every read of a value by the host."""

    def __init__(self, *, forbid_sync: bool = False) -> None:
        super().__init__()
        self.names: list[str] = []
        self.forbid_sync = forbid_sync

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ocnn_fused":
            self.names.append(func._opname)
        if self.forbid_sync:
            assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device here"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def leaf(case: Case = CASE, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return case.random(seed, dtype).requires_grad_()


def assert_is_gradient(gradient: torch.Tensor, weight: torch.Tensor, case: Case = CASE, *, scale: float = 1.0) -> None:
    expected = scale * from_numpy(loss_and_grad(weight, case)[1])
    torch.testing.assert_close(gradient, expected, rtol=TIGHT, atol=TIGHT)


# ----------------------------------------------------------------------------------------------------------------------
# First and second derivatives
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_gradcheck(case: Case, squared: bool, backend: str) -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss(weight, **case.options, squared=squared, backend=backend)

    assert torch.autograd.gradcheck(loss, leaf(case), fast_mode=case in LARGER)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradgradcheck(case: Case, squared: bool) -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss(weight, **case.options, squared=squared)

    assert torch.autograd.gradgradcheck(loss, leaf(case))


def test_third_derivative() -> None:
    case = Case((3, 2, 3))
    got, wanted = (
        nested_grads(function(weight, **case.options), weight, 3)
        for function, weight in ((fused_orth_loss, leaf(case)), (reference.orth_loss, leaf(case)))
    )
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def nested_grads(value: torch.Tensor, weight: torch.Tensor, order: int) -> list[torch.Tensor]:
    found = []
    for _ in range(order):
        (gradient,) = torch.autograd.grad(value, weight, create_graph=True)
        found.append(gradient)
        value = gradient.pow(2).sum()
    return found


def test_gradient_of_many_under_create_graph() -> None:
    """Only some weights need a gradient; theirs can be differentiated again."""
    trained, frozen = leaf(), Case((4, 2)).random()
    losses = fused_orth_loss_foreach([trained, frozen], squared=True)
    (gradient,) = torch.autograd.grad(losses.sum(), trained, create_graph=True)
    (second,) = torch.autograd.grad(gradient.pow(2).sum(), trained)
    expected = nested_grads(reference.orth_loss(trained), trained, 2)[1]
    torch.testing.assert_close(second, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "case", [Case((4, 4)), Case((24, 24, 1, 1)), Case((8, 8, 2, 2), stride=2), Case((9, 1, 3, 3), groups=9)], ids=str
)
def test_norm_has_zero_gradient_at_zero(case: Case, backend: str) -> None:
    """Where the loss is exactly zero, and hence its norm not differentiable."""
    for dtype in TOLERANCES:
        for weight in (dirac(case), -dirac(case)):
            loss, gradient = fused(weight.to(dtype), case, squared=False, backend=backend)
            assert loss.item() == 0
            assert not gradient.any()
            assert not gradient.isnan().any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_is_the_root(case: Case, backend: str) -> None:
    weight = case.random()
    expected_loss, expected_gradient = loss_and_grad(weight, case, squared=False)
    loss, gradient = fused(weight, case, squared=False, backend=backend)
    assert loss.item() == pytest.approx(expected_loss, rel=TIGHT)
    torch.testing.assert_close(gradient, from_numpy(expected_gradient), rtol=TIGHT, atol=TIGHT)


# ----------------------------------------------------------------------------------------------------------------------
# The graph
# ----------------------------------------------------------------------------------------------------------------------


def test_grad_output_scales(backend: str) -> None:
    weight = leaf()
    loss = fused_orth_loss(weight, backend=backend)
    (gradient,) = torch.autograd.grad(loss, weight, torch.tensor(-0.25, dtype=loss.dtype))
    assert_is_gradient(gradient, weight, scale=-0.25)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5, float("nan")])
def test_a_gradient_of_one_and_any_other(scale: float, again: bool) -> None:
    """A loss that is differentiated itself gets its gradient unscaled, and with memory of its own."""
    weight = LARGER[0].random().requires_grad_()
    expected = from_numpy(loss_and_grad(weight.detach(), LARGER[0])[1])
    loss = fused_orth_loss(weight, **LARGER[0].options)
    incoming = torch.tensor(scale, dtype=loss.dtype)
    (first,) = torch.autograd.grad(loss, weight, incoming, retain_graph=again)
    torch.testing.assert_close(first, scale * expected, rtol=TIGHT, atol=TIGHT, equal_nan=True)
    first.zero_()
    if again:
        (second,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(second, expected, rtol=TIGHT, atol=TIGHT)


def test_retain_graph_and_accumulation(backend: str) -> None:
    weight = leaf()
    loss = fused_orth_loss(weight, backend=backend)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)
    fused_orth_loss(weight, backend=backend).backward()
    assert torch.equal(weight.grad, 3 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_are_not_shared(backend: str) -> None:
    """Writing into one gradient changes neither the saved one nor the next."""
    weight = leaf()
    loss = fused_orth_loss(weight, backend=backend)
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(second, kept)


def test_weight_changed_between_forward_and_backward(backend: str) -> None:
    """A stale gradient is refused, as by PyTorch's own functions."""
    weight = leaf()
    inner = weight * 1
    loss = fused_orth_loss(inner, backend=backend)
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian(vectorize: bool, backend: str) -> None:
    """Several rows of a Jacobian through one graph, one by one or as a batch."""
    trained = leaf()

    def losses(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss_foreach([weight, 2 * weight], backend=backend)

    jacobian = torch.autograd.functional.jacobian(losses, trained, vectorize=vectorize)
    assert_is_gradient(jacobian[0], trained)
    assert_is_gradient(jacobian[1], 2 * trained, scale=2)


def test_batched_grad_outputs(backend: str) -> None:
    weight = leaf()
    scales = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss = fused_orth_loss(weight, backend=backend)
    (gradients,) = torch.autograd.grad(loss, weight, scales, is_grads_batched=True)
    for scale, gradient in zip(scales.tolist(), gradients, strict=True):
        assert_is_gradient(gradient, weight, scale=scale)


@pytest.mark.parametrize("again", [False, True])
def test_saved_tensor_hooks(again: bool, backend: str) -> None:
    """What a hook keeps of the saved gradients is the user's: a backward does not write into it."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor, tensor.detach().clone()))
        return tensor

    weight = leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fused_orth_loss(weight, backend=backend)
    (3 * loss).backward(retain_graph=again)
    assert_is_gradient(weight.grad, weight, scale=3)
    assert kept
    assert all(torch.equal(tensor, before) for tensor, before in kept)


def test_activation_checkpointing(backend: str) -> None:
    weight = leaf()
    loss = torch.utils.checkpoint.checkpoint(lambda w: fused_orth_loss(w, backend=backend), weight, use_reentrant=False)
    loss.backward()
    assert_is_gradient(weight.grad, weight)


def test_hooks(backend: str) -> None:
    weight = leaf()
    seen = []
    weight.register_hook(lambda grad: seen.append("tensor") or 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    loss = fused_orth_loss(weight, backend=backend)
    loss.register_hook(lambda grad: seen.append("loss"))
    loss.backward()
    assert seen == ["loss", "tensor", "accumulated"]
    assert_is_gradient(weight.grad, weight, scale=2)


def test_inside_a_larger_graph(backend: str) -> None:
    """A weight that is itself computed, as under weight normalisation."""
    direction, scale = leaf(), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    results = []
    for function, options in ((fused_orth_loss, {"backend": backend}), (reference.orth_loss, {})):
        weight = scale * direction / direction.norm()
        loss = function(weight, **options) + 3 * function(weight, **options).sqrt()
        results.append(torch.autograd.grad(loss, (direction, scale)))
    torch.testing.assert_close(*results, rtol=TIGHT, atol=TIGHT)


def test_deepcopy_of_a_module(backend: str) -> None:
    layer = torch.nn.Conv2d(4, 6, 3).double()
    fused_orth_loss(layer.weight, backend=backend).backward()
    twin = copy.deepcopy(layer)
    fused_orth_loss(twin.weight, backend=backend).backward()
    assert torch.equal(twin.weight.grad, layer.weight.grad)
    assert twin.weight.grad.data_ptr() != layer.weight.grad.data_ptr()


def test_optimiser_reaches_an_orthogonal_layer(backend: str) -> None:
    weight = Case((4, 6, 3, 3)).random().requires_grad_()
    optimiser = torch.optim.SGD([weight], lr=0.1)
    for _ in range(100):
        optimiser.zero_grad()
        fused_orth_loss(weight, backend=backend).backward()
        optimiser.step()
    assert fused_orth_loss(weight.detach(), backend=backend).item() < 1e-2


def test_threads(backend: str) -> None:
    """Several Python threads at once, of several shapes, forward and backward, find what one finds alone."""
    cases = (Case((24, 20, 3, 3)), Case((40, 3, 7, 7), stride=2), Case((32, 1, 3, 3), groups=32), Case((17, 30)))
    weights = [case.random() for case in cases]
    alone = [fused(weight, case, backend=backend) for weight, case in zip(weights, cases, strict=True)]
    failures: list[object] = []
    start = threading.Barrier(4)

    def work(offset: int) -> None:
        try:
            start.wait()
            for step in range(12):
                index = (offset + step) % len(cases)
                got = fused(weights[index], cases[index], backend=backend)
                if not all(map(torch.equal, got, alone[index])):
                    failures.append(cases[index])
        except Exception as error:  # a thread's error must reach the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ----------------------------------------------------------------------------------------------------------------------
# Only what is needed
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("context", "requires_grad", "with_grad"),
    [
        (nothing, True, True),
        (nothing, False, False),
        (torch.no_grad, True, False),
        (torch.inference_mode, True, False),
    ],
    ids=["trained", "frozen", "no_grad", "inference_mode"],
)
@pytest.mark.parametrize("many", [False, True])
def test_gradient_is_computed_only_if_needed(
    context: Callable, requires_grad: bool, with_grad: bool, many: bool, backend: str
) -> None:
    weight = CASE.random().requires_grad_(requires_grad)
    with context(), Recorder() as recorder:
        if many:
            loss = fused_orth_loss_foreach([weight, weight], backend=backend)
        else:
            loss = fused_orth_loss(weight, backend=backend)
    assert ("orth_loss_and_grad" in recorder.names) == with_grad
    assert ("orth_loss" in recorder.names) != with_grad
    assert loss.requires_grad == with_grad
    with torch.no_grad():
        assert loss.flatten()[0].item() == pytest.approx(loss_and_grad(weight, CASE)[0], rel=TIGHT)


def test_inference_tensors(backend: str) -> None:
    with torch.inference_mode():
        weight = CASE.random() * 1
        assert weight.is_inference()
        loss = fused_orth_loss(weight, backend=backend)
    assert fused_orth_loss(weight, backend=backend).item() == loss.item()


@pytest.mark.parametrize("squared", [True, False])
def test_backward_does_not_wait_for_the_device(squared: bool, backend: str) -> None:
    weight = leaf()
    loss = fused_orth_loss(weight, squared=squared, backend=backend)
    with Recorder(forbid_sync=True) as recorder:
        loss.backward()
    assert not recorder.names  # a multiply, no pass of ours
    with pytest.raises(AssertionError, match="host waits"), Recorder(forbid_sync=True):
        loss.item()


# ----------------------------------------------------------------------------------------------------------------------
# torch.compile, torch.func, autocast, the dispatcher
# ----------------------------------------------------------------------------------------------------------------------


def compiled_agrees(function: Callable, weights: list[torch.Tensor], **compile_options: object) -> None:
    compiled = torch.compile(function, fullgraph=True, **compile_options)
    for weight in weights:
        results = []
        for run in (function, compiled):
            fresh = weight.detach().clone().requires_grad_()
            loss = run(fresh)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), fresh)))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_static(case: Case, squared: bool) -> None:
    def function(weight: torch.Tensor) -> torch.Tensor:
        return 2 * fused_orth_loss(weight.sin(), **case.options, squared=squared)

    compiled_agrees(function, [case.random()], backend="aot_eager", dynamic=False)
    explanation = torch._dynamo.explain(function)(case.random())
    assert explanation.graph_break_count == 0
    assert explanation.graph_count == 1


def test_compile_dynamic(backend: str) -> None:
    """One graph serves every size."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss(weight, 2, backend=backend)

    weights = [Case(shape).random() for shape in ((6, 4, 3, 5), (9, 5, 4, 4), (12, 7, 2, 3), (40, 3, 7, 7))]
    compiled_agrees(function, weights, backend=counter, dynamic=True)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    weight = torch.randn(4, 3, 3, 3)
    traced = make_fx(lambda weight: fused_orth_loss(weight), tracing_mode=mode)(weight)
    torch.testing.assert_close(traced(weight), fused_orth_loss(weight))


def test_compile_inductor() -> None:
    def function(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss(weight.tanh(), 2) + fused_orth_loss(weight).sqrt()

    compiled_agrees(function, [Case((8, 6, 3, 3)).random()], backend="inductor")


def test_compile_foreach() -> None:
    def function(weight: torch.Tensor) -> torch.Tensor:
        return fused_orth_loss_foreach([weight, weight[:4], weight.flatten(1)], [1, 2, 1], paddings=[0, None, None])

    compiled_agrees(function, [leaf()], backend="aot_eager")


def test_compile_without_grad() -> None:
    compiled = torch.compile(fused_orth_loss, fullgraph=True, backend="aot_eager")
    weight = leaf()
    with torch.no_grad():
        assert compiled(weight).item() == fused_orth_loss(weight).item()


def test_compile_with_other_layouts() -> None:
    weight = Case((8, 6, 3, 3)).random().contiguous(memory_format=torch.channels_last)
    compiled_agrees(lambda w: fused_orth_loss(w), [weight, weight[:, ::2], weight.contiguous()], backend="aot_eager")


def test_torch_func(backend: str) -> None:
    weight = CASE.random()
    gradient, loss = torch.func.grad_and_value(lambda w: fused_orth_loss(w, backend=backend))(weight)
    assert_is_gradient(gradient, weight)
    assert loss.item() == pytest.approx(loss_and_grad(weight, CASE)[0], rel=TIGHT)


def test_functional_call(backend: str) -> None:
    layer = torch.nn.Conv2d(4, 6, 3).double()

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return fused_orth_loss(parameters["weight"], backend=backend)

    gradient = torch.func.grad(loss)(dict(layer.named_parameters()))["weight"]
    assert_is_gradient(gradient, layer.weight)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_keeps_float32(low: torch.dtype, backend: str) -> None:
    """The loss is not computed in the low precision, and the gradient has the weight's dtype."""
    case = Case((24, 16, 3, 3))
    for dtype in (torch.float32, low):
        weight = leaf(case, dtype=dtype)
        plain, plain_gradient = fused(weight, case, backend=backend)
        with torch.autocast("cpu", low):
            loss = fused_orth_loss(weight, backend=backend)
            losses = fused_orth_loss_foreach([weight], backend=backend)
        assert loss.dtype == losses.dtype == torch.float32
        assert loss.item() == losses.item() == plain.item()
        (gradient,) = torch.autograd.grad(loss, weight)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, plain_gradient, rtol=1e-2 if dtype == low else 1e-6, atol=1e-6)


def test_autocast_leaves_float64(backend: str) -> None:
    weight = CASE.random()
    with torch.autocast("cpu", torch.bfloat16):
        assert_matches_definition(weight, CASE, backend=backend)


def test_autocast_double_backward() -> None:
    weight = leaf(dtype=torch.float32)
    plain = nested_grads(fused_orth_loss(weight), weight, 2)
    with torch.autocast("cpu", torch.bfloat16):
        under = nested_grads(fused_orth_loss(weight), weight, 2)
    torch.testing.assert_close(under, plain, rtol=1e-5, atol=1e-6)


def arguments(case: Case, backend: str) -> Flat:
    return flatten([problem(case)], Options(backend=backend))


OPCHECKED = {"orth_loss", "orth_loss_and_grad", "orth_grad"}


def test_every_op_is_checked() -> None:
    """But for the compiled one, which takes an object, so that no tracer ever sees it."""
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ocnn_fused::")}
    assert {name.removeprefix("ocnn_fused::").partition(".")[0] for name in registered} - {"execute"} == OPCHECKED


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_loss(case: Case, requires_grad: bool, backend: str) -> None:
    weight = case.random().requires_grad_(requires_grad)
    torch.library.opcheck(torch.ops.ocnn_fused.orth_loss.default, ([weight], *arguments(case, backend)))


@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_loss_and_grad(case: Case, needed: bool, backend: str) -> None:
    """Not differentiable itself: it is what the differentiable op runs. Strides of fake and real gradient agree."""
    weight = case.random()
    channels_last = weight.transpose(1, -1).contiguous().transpose(1, -1)
    sliced = torch.cat([weight, weight], 1)[:, : case.shape[1]]
    for layout in (weight, channels_last, sliced):
        torch.library.opcheck(
            torch.ops.ocnn_fused.orth_loss_and_grad.default, ([layout], [needed], *arguments(case, backend))
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_grad(case: Case) -> None:
    weight = case.random().requires_grad_()
    grad = torch.autograd.grad(fused_orth_loss(weight, **case.options), weight)
    torch.library.opcheck(
        torch.ops.ocnn_fused.orth_grad.default, ([weight], list(grad), *flatten_problems([problem(case)]))
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_meta_tensors(dtype: torch.dtype) -> None:
    weight = torch.empty(4096, 4096, 3, 3, device="meta", dtype=dtype, requires_grad=True)
    loss = fused_orth_loss(weight, 2)
    assert (loss.shape, loss.device.type) == ((), "meta")
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, dtype)


def test_fake_tensors(backend: str) -> None:
    with FakeTensorMode():
        weights = [torch.empty(64, 32, 3, 3, requires_grad=True), torch.empty(16, 8, dtype=torch.bfloat16)]
        losses = fused_orth_loss_foreach(weights, backend=backend)
        assert (tuple(losses.shape), losses.dtype) == ((2,), torch.float32)
        losses.sum().backward()
        assert weights[0].grad.shape == weights[0].shape
