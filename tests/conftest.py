"""What all tests share: tolerances, backends and poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

# Triton decides when its functions are decorated, so before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from oracle import Case, loss_and_grad

from ocnn_fused import fused_orth_loss

#: Without triton, only what the backend then says is tested.
collect_ignore = (
    []
    if find_spec("triton")
    else [f"test_triton_{part}.py" for part in ("api", "kernels", "launch", "precision", "tune")]
)

#: Error against the definition in float64: of the loss relative to max(1, loss), of the gradient to its largest entry.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Limits:
    """How much less accurate than the plain formula in the same dtype a plan may be."""

    grad_ratio: float = 4.0  # float32, classes of up to `ratio_taps` taps: times the reference's own error
    ratio_taps: int = 3
    grad_random: float = 3e-5  # float32, up to 5 taps, at random initialisation
    loss_ratio: float = 4.0  # float32: times the reference's own error ...
    loss_relative: float = 2e-6  # ... or this, whichever is larger
    half_ratio: float = 2.0  # bfloat16 and float16: times the reference's own error


LIMITS = Limits()

#: Backends that run everywhere. The environment adds those of the machine at hand, or leaves out what is not built.
BACKENDS = tuple(filter(None, os.environ.get("OCNN_FUSED_TEST_BACKENDS", "cpu,torch").split(",")))
DEVICES = {"cpu": "cpu", "torch": "cpu", "triton": "cuda", "cuda": "cuda"}


def _param(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.gpu if DEVICES[name] == "cuda" else ())


@pytest.fixture(params=[_param(name) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def device(backend: str) -> torch.device:
    return torch.device(DEVICES[backend])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, in C++ too, so that a value that nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def grad_of(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient


def fused(weight: torch.Tensor, case: Case, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the package under test; the weight is left alone."""
    leaf = weight.detach().requires_grad_()
    loss = fused_orth_loss(leaf, **case.options, **options)
    return loss.detach(), grad_of(loss, leaf)


def errors(loss: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, case: Case) -> tuple[float, float]:
    """Of loss and gradient, relative as in TOLERANCES."""
    expected_loss, expected_gradient = loss_and_grad(weight, case)
    scale = abs(expected_gradient).max() or 1.0
    difference = abs(gradient.detach().double().cpu().numpy() - expected_gradient).max()
    return abs(loss.item() - expected_loss) / max(1.0, expected_loss), float(difference / scale)


def assert_matches_definition(
    weight: torch.Tensor, case: Case, *, tolerance: float | None = None, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient, both checked, of the weight in its own dtype."""
    loss, gradient = fused(weight, case, **options)
    assert loss.shape == ()
    assert gradient.dtype == weight.dtype
    assert gradient.shape == weight.shape
    limit = TOLERANCES[weight.dtype] if tolerance is None else tolerance
    loss_error, grad_error = errors(loss, gradient, weight, case)
    assert loss_error <= limit, (str(case), options, loss_error)
    assert grad_error <= limit, (str(case), options, grad_error)
    return loss, gradient
