"""What the backend says where it cannot run: no triton, an old one, no GPU, one that is too old."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ocnn_fused.backends.triton import availability

CUDA = torch.device("cuda", 0)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "triton_reason", lambda: None)


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str = "a GPU") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = availability.unavailable_reason(CUDA)
    assert reason == "triton is not installed; `pip install ocnn-fused[triton]`"


@needs_triton
def test_with_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.2.0")
    reason = availability.unavailable_reason(CUDA)
    assert reason == "triton 3.2.0 is too old, 3.3 or newer is needed; `pip install 'triton>=3.3'`"


@needs_triton
@pytest.mark.parametrize("version", ["3.3.0", "3.10.1", "4.0", "3.7.1+git123"])
def test_versions_that_serve(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    assert availability.triton_reason() is None


@pytest.mark.usefixtures("with_triton")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert availability.unavailable_reason(CUDA).startswith("torch sees no GPU (")


@pytest.mark.usefixtures("with_triton")
def test_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in availability.unavailable_reason(torch.device("cpu"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert availability.unavailable_reason(torch.device("cpu")) is None


@pytest.mark.usefixtures("with_triton")
def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    gpu(monkeypatch, (7, 5), "Tesla T4")
    assert availability.unavailable_reason(CUDA) == "Tesla T4 is sm_75, and Triton uses tensor cores only from sm_80 on"
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        gpu(monkeypatch, capability)
        assert availability.unavailable_reason(CUDA) is None
    assert availability.unavailable_reason(torch.device("meta")) == "it serves CUDA and ROCm devices, not meta"


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(("architecture", "served"), [("gfx90a", True), ("gfx942:sramecc+", True), ("gfx1100", False)])
def test_amd_architectures(architecture: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture))
    reason = availability.unavailable_reason(CUDA)
    assert (reason is None) == served
    assert served or architecture in reason


def test_the_backend_imports_without_triton() -> None:
    """In a process where triton cannot be imported, the package works and the backend says why it does not."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, importlib.util\n"
        "importlib.util.find_spec = lambda name, *a: None\n"
        "from ocnn_fused.backends import triton as backend\n"
        "print(backend.unavailable_reason(torch.device('cuda')))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "triton is not installed; `pip install ocnn-fused[triton]`"
