"""Where the Triton tests run: on a GPU if there is one, else in the interpreter on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from conftest import TRITON_ON_GPU as ON_GPU
from oracle import Case, loss_and_grad
from plans import candidates, plan_named

from ocnn_fused.backends.triton import cooperative
from ocnn_fused.backends.triton.config import Config
from ocnn_fused.backends.triton.launch import Call
from ocnn_fused.plan import Plan

__all__ = ["BIG", "DEVICE", "EDGES", "ON_GPU", "TOLERANCE", "WIDE_EDGES", "Call", "candidates", "check", "errors"]
__all__ += ["execution"]
__all__ += ["needs_interpreter", "needs_single", "on_device", "plan_named", "run", "skip_if_impossible", "tl", "triton"]

DEVICE = torch.device("cuda" if ON_GPU else "cpu")

needs_interpreter = pytest.mark.skipif(ON_GPU, reason="program order and rounding are set in the interpreter")


NO_SINGLE = "no single launch on AMD, where a grid cannot be proven to fit, nor before triton 3.5"
needs_single = pytest.mark.skipif(not cooperative.is_possible(), reason=NO_SINGLE)


def skip_if_impossible(launch: str | None) -> None:
    if launch == "single" and not cooperative.is_possible():
        pytest.skip(NO_SINGLE)


#: Big tiles for the interpreter, whose time does not depend on their size; and small ones, for many edges.
BIG = Config(tile=64, rows=8, columns=64, gathered_columns=64, lanes=512)
EDGES = Config(tile=16, depth=16, rows=4, columns=16, gathered_columns=32, lanes=16)
WIDE_EDGES = replace(EDGES, wide=32)

TOLERANCE = 3e-5


def execution(order: str = "sequential", seed: int = 0) -> contextlib.AbstractContextManager[Any]:
    """Program order and repairs of the interpreter; nothing on a GPU."""
    if ON_GPU:
        return contextlib.nullcontext()
    import interpreter

    return interpreter.repaired(order, seed)


def run(
    weights: Sequence[torch.Tensor],
    plans: Sequence[Plan],
    *,
    with_grad: bool = True,
    precision: str = "ieee",
    config: Config = BIG,
    programs: int | None = None,
    order: str = "sequential",
    seed: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses and gradients of given plans in a given configuration."""
    with execution(order, seed):
        call = Call(weights, plans, with_grad, precision, config)
        call.run(programs)
    return call.losses.cpu(), [grad.cpu() for grad in call.grads()]


def on_device(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return case.random(seed, dtype).to(DEVICE)


def errors(loss: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, case: Case) -> tuple[float, float]:
    """Relative to max(1, loss) and to the largest entry of the gradient; NaN counts as infinite."""
    expected_loss, expected_grad = loss_and_grad(weight.cpu(), case)
    loss_error = abs(loss.item() - expected_loss) / max(1.0, expected_loss)
    grad_error = abs(grad.double().numpy() - expected_grad).max() / abs(expected_grad).max()
    return tuple(error if error == error else float("inf") for error in (loss_error, float(grad_error)))  # type: ignore[return-value]


def check(case: Case, plan: Plan, tolerance: float = TOLERANCE, **options: Any) -> None:
    """Loss and gradient of one weight against the definition in float64."""
    weight = on_device(case)
    losses, (grad,) = run([weight], [plan], **options)
    worst = max(errors(losses[0], grad, weight, case))
    assert worst <= tolerance, (str(case), plan.name, options, worst)
