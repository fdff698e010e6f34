"""``python -m ocnn_fused.info`` names every backend with the reason why it cannot serve."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
import torch

from ocnn_fused import _extension, fused_orth_loss, info
from ocnn_fused.backends import MODULES, choose


@cache
def report(**environment: str) -> str:
    command = [sys.executable, "-m", "ocnn_fused.info"]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_command_prints_versions_backends_and_flags() -> None:
    text = report(OCNN_FUSED_BACKEND="torch")
    assert f"torch {torch.__version__}" in text
    assert "OCNN_FUSED_BACKEND=torch" in text
    for name in MODULES:
        assert f"\n  {name} " in text


def test_missing_extension_is_explained() -> None:
    text = report(OCNN_FUSED_DISABLE_EXTENSION="1")
    assert "extension: the compiled extension is switched off" in text
    # The extension, and why cpu and cuda cannot serve.
    assert text.count("switched off by OCNN_FUSED_DISABLE_EXTENSION=1") == 3


@pytest.mark.parametrize(
    ("architectures", "line"),
    [(["sm_80", "sm_90", "compute_90"], "  architectures: sm_80 sm_90 compute_90"), ([], "  architectures: none")],
)
def test_architectures_are_told(architectures: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "build_info", {**(_extension.build_info or {}), "architectures": architectures})
    assert line in info.lines()


def test_architectures_of_this_build_are_told() -> None:
    assert _extension.build_info is not None
    architectures = _extension.build_info["architectures"]
    assert bool(architectures) == (_extension.build_info["cuda"] is not None)
    assert f"  architectures: {' '.join(architectures) or 'none'}\n" in report(OCNN_FUSED_BACKEND="torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_missing_gpu_is_explained() -> None:
    text = "\n".join(info.lines())
    assert "cuda (torch sees no GPU)" in text
    if "triton not installed" not in text:
        assert "torch sees no GPU" in text.split("cuda (torch sees no GPU)")[1]


def test_reasons_are_those_of_the_backends() -> None:
    assert _extension.module is not None
    cpu = next(device for device in info.devices() if device.type == "cpu")
    assert f"  {'cpu':<7} available" in "\n".join(info.lines())
    assert MODULES["cpu"].unavailable_reason(cpu) is None


# ----------------------------------------------------------------------------------------------------------------------
# What is missing for triton, in the report and when it is asked for by name
# ----------------------------------------------------------------------------------------------------------------------


def no_triton(monkeypatch: pytest.MonkeyPatch) -> str:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
    )
    return "triton is not installed; `pip install ocnn-fused[triton]`"


def old_triton(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.2.0")
    return "triton 3.2.0 is too old, 3.3 or newer is needed; `pip install 'triton>=3.3'`"


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    return f"torch sees no GPU (a CPU build, torch {torch.__version__})"


def no_driver(monkeypatch: pytest.MonkeyPatch) -> str:
    no_gpu(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return f"torch sees no GPU (no usable driver or GPU, torch {torch.__version__})"


def old_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    return "Tesla T4 is sm_75, and Triton uses tensor cores only from sm_80 on"


@pytest.mark.parametrize("world", [no_triton, old_triton, no_gpu, no_driver, old_gpu])
def test_what_triton_lacks(world: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence in the report of the GPU and in the error of a forced backend."""
    missing = world(monkeypatch)
    report = list(info.lines())
    gpu = next(index for index, line in enumerate(report) if line.startswith("cuda"))
    assert f"  triton  {missing}" in report[gpu:]
    with pytest.raises(RuntimeError, match=re.escape(f"backend 'triton' is not available: {missing}")):
        choose(torch.device("cuda", 0), "triton")


def test_a_forced_triton_on_cpu_tensors_says_how_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match=r"backend 'triton' is not available: .*TRITON_INTERPRET=1"):
        fused_orth_loss(torch.eye(4), backend="triton")
    assert any(line.startswith("  triton  it serves GPUs") for line in info.lines())
