"""What all tests share: tolerances, backends and poisoned memory."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ocnn_fused.backends.triton.availability import device_reason, interpreted

# For the folder experiments/. Last, because the package under test may be another copy, see `make sanitize`.
sys.path.append(str(Path(__file__).resolve().parents[1]))

# Triton decides when its functions are decorated, so before it is imported. On a GPU that it does not serve it
# interprets, as without any.
os.environ.setdefault("TRITON_INTERPRET", "0" if device_reason(torch.device("cuda")) is None else "1")

# cuBLAS gives the same bits each time only if it is told so before it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Inductor would take kernels from its cache that were compiled for other instructions, with wrong results, because
# ATEN_CPU_CAPABILITY is not a part of its key: each instruction set has a cache of its own.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    str(Path(tempfile.gettempdir()) / f"torchinductor-{getpass.getuser()}-{torch.backends.cpu.get_cpu_capability()}"),
)

from oracle import Case, loss_and_grad

from ocnn_fused import _extension, backends, fused_orth_loss

#: Whether the Triton kernels run on a GPU.
TRITON_ON_GPU = torch.cuda.is_available() and not interpreted()

#: Without triton, only what the backend then says is tested.
collect_ignore = (
    []
    if find_spec("triton")
    else [f"test_triton_{part}.py" for part in ("api", "kernels", "launch", "precision", "targets", "tune")]
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


@contextlib.contextmanager
def kernels_run(backend: str) -> Iterator[None]:
    """Within it calls of the backend are executed, those of Triton's kernels too."""
    if backend != "triton":
        yield
        return
    from triton_support import execution

    with execution():
        yield


@pytest.fixture
def matmul_settings() -> Iterator[Any]:
    """torch's newer setting of the precision of products; it and the older one are put back as they were."""
    setting = torch.backends.cuda.matmul
    older, newer = torch.get_float32_matmul_precision(), getattr(setting, "fp32_precision", None)
    yield setting
    if newer is not None:
        setting.fp32_precision = newer
    torch.set_float32_matmul_precision(older)


#: Whether the part for GPUs runs on tests/stand_in.py: of the tests themselves it shows whether a GPU would fail them.
STAND_IN = os.environ.get("OCNN_FUSED_TEST_STAND_IN") == "1"
if STAND_IN:
    import stand_in

    stand_in.install()

GPU = stand_in.NAME if STAND_IN else "cuda"
DEVICES = {"cpu": "cpu", "torch": "cpu", "triton": GPU, "cuda": GPU}


def _missing(backend: str) -> str | None:
    """Why a GPU backend cannot be tested here; the others must run everywhere."""
    if STAND_IN:
        return "the stand-in for a GPU has one backend" if backend != "cuda" else None
    return backends.MODULES[backend].unavailable_reason(torch.device("cuda")) if DEVICES[backend] == GPU else None


#: What the environment asks for (all of it must run), else every backend that this machine can run.
_ASKED = tuple(filter(None, os.environ.get("OCNN_FUSED_TEST_BACKENDS", "").split(",")))
BACKENDS = _ASKED or tuple(name for name in DEVICES if _missing(name) is None)


def _param(name: str) -> object:
    marks = [pytest.mark.gpu] if DEVICES[name] == GPU else []
    marks += [] if name in BACKENDS else [pytest.mark.skip(reason=f"backend {name!r}: {_missing(name)}")]
    return pytest.param(name, marks=marks)


@contextlib.contextmanager
def float32_convolutions(precision: str) -> Iterator[None]:
    """What cuDNN's convolutions are allowed, "ieee" or "tf32", in whichever way this torch is told."""
    newer = getattr(torch.backends.cudnn, "conv", None)
    owner, name = (newer, "fp32_precision") if newer is not None else (torch.backends.cudnn, "allow_tf32")
    before = getattr(owner, name)
    setattr(owner, name, precision if newer is not None else precision == "tf32")
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.fixture(params=[_param(name) for name in _ASKED or DEVICES])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend in turn; what a test makes meanwhile lies on its device, where products are not rounded."""
    on_gpu = DEVICES[request.param] == GPU
    with float32_convolutions("ieee"), torch.device(GPU) if on_gpu else contextlib.nullcontext():
        yield request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if STAND_IN else ():
        if any(part in item.nodeid for part in stand_in.LEFT_OUT):
            item.add_marker(pytest.mark.skip(reason="not possible with the stand-in for a GPU"))


def unusable_gpu(torch_cuda: str | None, available: bool, driver: Path, visible: str | None) -> str | None:
    """Why a run would be green with everything for GPUs skipped: a driver that is too old for torch's CUDA."""
    if torch_cuda is None or available or visible in ("", "-1") or not driver.exists():
        return None
    version = driver.read_text().splitlines()[0].strip()
    return (
        f"torch {torch.__version__} is built for CUDA {torch_cuda} and sees no GPU, but this machine has a driver "
        f"({version}): install one that is new enough, or set CUDA_VISIBLE_DEVICES='' to test the CPU alone"
    )


def pytest_configure() -> None:
    driver = Path("/proc/driver/nvidia/version")
    reason = unusable_gpu(torch.version.cuda, torch.cuda.is_available(), driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if reason is not None:
        pytest.exit(reason, returncode=1)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, in C++ too, so that a value that nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert torch.empty(64).isnan().all()
    poisoned = _extension.module is not None and _extension.module.poison(True)
    yield
    if _extension.module is not None:
        _extension.module.poison(poisoned)
    torch.use_deterministic_algorithms(before)


def grad_of(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, weight)
    return gradient


def fused(weight: torch.Tensor, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the package under test, on the backend's device; the weight is left alone."""
    device = DEVICES.get(str(options.get("backend")), weight.device)
    leaf = weight.detach().to(device).requires_grad_()
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
