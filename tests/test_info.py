"""``python -m ocnn_fused.info`` names every backend with the reason why it cannot serve."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from ocnn_fused import _extension, info
from ocnn_fused.backends import BACKENDS


def report(**environment: str) -> str:
    command = [sys.executable, "-m", "ocnn_fused.info"]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_command_prints_versions_backends_and_flags() -> None:
    text = report(OCNN_FUSED_BACKEND="torch")
    assert f"torch {torch.__version__}" in text
    assert "OCNN_FUSED_BACKEND=torch" in text
    for name in BACKENDS:
        assert f"\n  {name} " in text


def test_missing_extension_is_explained() -> None:
    text = report(OCNN_FUSED_DISABLE_EXTENSION="1")
    assert "extension: the compiled extension is switched off" in text
    assert text.count("switched off by OCNN_FUSED_DISABLE_EXTENSION=1") == 2  # the extension, and why cpu cannot serve


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
    assert BACKENDS["cpu"].unavailable_reason(cpu) is None
