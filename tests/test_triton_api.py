"""The Triton backend through the public functions: values, options, torch.compile and the op's own checks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import TOLERANCES
from oracle import Case, loss_and_grad
from plans import problem
from triton_support import DEVICE, errors, execution, needs_interpreter, on_device, skip_if_impossible

from ocnn_fused import explain, fused_orth_loss, fused_orth_loss_foreach, kernel_orth_loss
from ocnn_fused.backends.triton import availability
from ocnn_fused.problem import Options, flatten, unflatten

CASES = [Case((6, 4, 3), 2), Case((8, 16)), Case((6, 1, 3), groups=6)]


@pytest.mark.parametrize("launch", [None, "single", "staged"])
def test_loss_and_gradient(launch: str | None) -> None:
    skip_if_impossible(launch)
    case = CASES[0]
    weight = on_device(case).requires_grad_()
    with execution():
        loss = fused_orth_loss(weight, **case.options, backend="triton", precision="ieee", launch=launch)
    loss.backward()
    assert max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case)) <= TOLERANCES[torch.float32]


def losses_of(weights: list[torch.Tensor], launch: str | None = None) -> torch.Tensor:
    """Of weights of all CASES, in one call."""
    strides, groups = [case.stride for case in CASES], [case.groups for case in CASES]
    return fused_orth_loss_foreach(weights, strides, groups=groups, backend="triton", precision="ieee", launch=launch)


def test_foreach() -> None:
    weights = [on_device(case).requires_grad_() for case in CASES]
    with execution():
        losses = losses_of(weights)
    torch.stack(list(losses)).sum().backward()
    for case, weight, loss in zip(CASES, weights, losses, strict=True):
        worst = max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case))
        assert worst <= TOLERANCES[torch.float32]


@needs_interpreter
def test_frozen_layers_are_not_a_second_pass() -> None:
    weights = [on_device(case).requires_grad_(index != 1) for index, case in enumerate(CASES)]
    with execution() as scheduler:
        losses = losses_of(weights, launch="staged")
        losses.sum().backward()
    assert set(scheduler.launches.values()) == {1}
    for case, weight, loss in zip(CASES, weights, losses, strict=True):
        grad = weight.grad if weight.grad is not None else torch.from_numpy(loss_and_grad(weight, case)[1])
        assert max(errors(loss.detach().cpu(), grad.cpu(), weight.detach(), case)) <= TOLERANCES[torch.float32]
    assert weights[1].grad is None


def test_a_list_with_float64_and_frozen_weights() -> None:
    cases = [Case((6, 8))] * 4
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32]
    weights = [on_device(case, dtype, seed) for seed, (case, dtype) in enumerate(zip(cases, dtypes, strict=True))]
    for weight in weights[:2]:
        weight.requires_grad_()
    with execution():
        losses = fused_orth_loss_foreach(weights, backend="triton", precision="ieee")
        losses.sum().backward()
    for case, weight, loss in zip(cases[:2], weights, losses, strict=False):
        assert max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case)) <= TOLERANCES[torch.float32]
    assert all(weight.grad is None for weight in weights[2:])


def test_compiled_without_graph_breaks() -> None:
    weight = on_device(CASES[1]).requires_grad_()

    def loss_of(weight: torch.Tensor) -> torch.Tensor:
        return 2 * fused_orth_loss(weight, backend="triton", precision="ieee")

    with execution():
        loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(weight)
        (grad,) = torch.autograd.grad(loss, weight)
        eager = loss_of(weight)
        (eager_grad,) = torch.autograd.grad(eager, weight)
    assert torch.equal(loss, eager)
    assert torch.equal(grad, eager_grad)


def test_the_op_keeps_its_promises() -> None:
    weights = [on_device(case).requires_grad_() for case in CASES[:2]]
    flat = flatten([problem(case) for case in CASES[:2]], Options(backend="triton", precision="ieee"))
    with_grad = ([True, True], [True, False], [False, True])
    ops = torch.ops.ocnn_fused
    with execution():
        for op, *more in ((ops.orth_loss,), *((ops.orth_loss_and_grad, wanted) for wanted in with_grad)):
            torch.library.opcheck(op.default, (weights, *more, *flat), test_utils=("test_schema", "test_faketensor"))


def test_options_are_checked() -> None:
    weight = on_device(CASES[1])
    with pytest.raises(ValueError, match="precision must be None or one of 'ieee'"):
        fused_orth_loss(weight, precision="fp8")
    with pytest.raises(ValueError, match="launch must be None or one of 'auto'"):
        fused_orth_loss(weight, launch="twice")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="says what a CPU does with them")
def test_other_backends_have_no_such_options() -> None:
    weight = on_device(CASES[1])
    assert torch.equal(
        fused_orth_loss(weight, backend="torch", precision="tf32"), fused_orth_loss(weight, backend="torch")
    )


@pytest.mark.parametrize("options", [{}, {"precision": "tf32"}, {"precision": "bf16", "launch": "single"}])
def test_options_survive_the_op(options: dict[str, str]) -> None:
    cases = [CASES[0], Case((6, 4, 5, 5), stride=(1, 2), dilation=2, groups=2, padding=2), Case((4, 4, 3), padding=0)]
    weights, problems = [case.random() for case in cases], tuple(problem(case) for case in cases)
    for backend in (None, "triton"):
        asked = Options(backend=backend, **options)
        assert unflatten(weights, *flatten(problems, asked)) == (problems, asked)


@pytest.mark.parametrize("device", ["A100", "H100"])
def test_explain_on_a_device(device: str) -> None:
    text = explain((512, 512, 3, 3), device=device, precision="tf32")
    assert text.splitlines()[0].endswith(f"by backend triton on {device}, tf32 (modelled, not measured)")
    assert "direct/row" in text
    assert "toom/row" in text


@pytest.mark.parametrize(
    ("launch", "expected"), [("single", {"single_kernel"}), ("staged", {"gram_kernel", "apply_kernel"})]
)
@needs_interpreter
def test_kernel_orth_loss_takes_the_same_options(launch: str, expected: set[str]) -> None:
    skip_if_impossible(launch)
    case = Case((6, 4, 2, 2), padding=0)
    weight = on_device(case).requires_grad_()
    with execution() as scheduler:
        loss = kernel_orth_loss(weight, side="row", backend="triton", precision="ieee", launch=launch)
    loss.backward()
    assert set(scheduler.launches) == expected
    assert max(errors(loss.detach().cpu(), weight.grad.cpu(), weight.detach(), case)) <= TOLERANCES[torch.float32]
    with pytest.raises(ValueError, match="precision must be None or one of"):
        kernel_orth_loss(weight, precision="fp8")
    with pytest.raises(ValueError, match="launch must be None or one of"):
        kernel_orth_loss(weight, launch="twice")
    with pytest.raises(ValueError, match="side must be"):
        kernel_orth_loss(weight, side="left")


def test_on_cpu_tensors_by_environment() -> None:
    """As a user without a GPU tries it: nothing but two variables, and no repairs of the interpreter."""
    code = (
        "import torch; from ocnn_fused import fused_orth_loss; from ocnn_fused.backends import choose\n"
        "torch.manual_seed(0)\n"
        "weight = torch.randn(6, 4, 3).mul_(0.3).requires_grad_()\n"
        "assert choose(weight.device) == 'triton'\n"
        "loss = fused_orth_loss(weight, 2); loss.backward()\n"
        "other = weight.detach().requires_grad_()\n"
        "expected = fused_orth_loss(other, 2, backend='torch'); expected.backward()\n"
        "torch.testing.assert_close(loss, expected); torch.testing.assert_close(weight.grad, other.grad)\n"
        "print('equal')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OCNN_FUSED_BACKEND": "triton"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    reason = availability.interpreter_reason()  # of a triton and a numpy that do not fit together
    if reason is None:
        assert result.stdout.strip() == "equal", result.stderr
    else:
        assert reason in result.stderr.splitlines()[-1]
