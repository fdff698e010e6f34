"""What the backend says where it cannot run: no triton, an old one, no GPU, one that is too old."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ocnn_fused.backends.triton import availability

CUDA = torch.device("cuda", 0)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "triton_reason", lambda: None)
    monkeypatch.setattr(availability, "driver_reason", lambda: None)
    monkeypatch.setattr(availability, "interpreter_reason", lambda: None)


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


@needs_triton
@pytest.mark.parametrize(
    ("triton_version", "numpy_version", "fits"),
    [("3.5.1", "2.5.0", False), ("3.6.0", "2.10.1", False), ("3.5.1", "2.4.6", True), ("3.7.1", "2.5.4", True)],
)
def test_numpy_for_the_interpreter(
    triton_version: str, numpy_version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy
    import triton

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(numpy, "__version__", numpy_version)
    reason = availability.unavailable_reason(torch.device("cpu"))
    assert (reason is None) == fits
    assert fits or reason.startswith(
        f"the interpreter of triton {triton_version} cannot use numpy {numpy_version}; `pip install 'numpy<2.5'`"
    )


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


#: A GPU that torch sees, a Triton that has never compiled its driver module, and no compiler to do so.
WITHOUT_COMPILER = """
import os, warnings, torch
os.environ.update(PATH="", TRITON_INTERPRET="0", TRITON_CACHE_DIR={cache!r}, TRITON_LIBCUDA_PATH={cache!r})
os.environ.pop("CC", None)
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "a GPU"
from ocnn_fused import backends
from ocnn_fused.backends import triton
print(triton.unavailable_reason(torch.device("cuda")))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(backends.choose(torch.device("cuda")))
print(said[0].message)
"""


@needs_triton
def test_without_a_compiler_the_next_backend_serves(tmp_path: Path) -> None:
    """Triton itself is asked, in a process where it does not interpret; and it is said why it was passed over."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    code = WITHOUT_COMPILER.format(cache=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    reason, chosen, warning = result.stdout.splitlines()
    assert reason.startswith("Triton cannot build its driver module, for which it needs a C compiler and libcuda (")
    assert "compiler" in reason.partition("(")[2]
    assert chosen == "torch"  # the CUDA backend where it was built
    assert reason in warning


@needs_triton
def test_the_driver_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    class Broken:
        asked = 0

        def get_current_target(self) -> None:
            Broken.asked += 1
            raise RuntimeError("no such driver\nand more")

    # Behind the property, where there is one: to read that would ask the real driver.
    monkeypatch.setattr(driver, "_active" if "_active" in vars(driver) else "active", Broken())
    availability.driver_reason.cache_clear()
    try:
        assert availability.driver_reason().endswith("(RuntimeError: no such driver)")
        availability.driver_reason()
        assert Broken.asked == 1
    finally:
        availability.driver_reason.cache_clear()


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
