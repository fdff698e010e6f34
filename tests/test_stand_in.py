"""Tests that are marked for GPUs also pass on a device that refuses what a GPU refuses; see stand_in.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.utils.backend_registration

if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no devices that are written in Python", allow_module_level=True)
HERE = Path(__file__).resolve().parent

SUITE = ("accuracy", "autograd", "bad_input", "foreach", "identities", "properties", "regularizer_networks")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OCNN_FUSED_TEST_STAND_IN": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_suite_is_fit_for_a_gpu() -> None:
    result = run(*(HERE / f"test_{part}.py" for part in SUITE))
    assert result.returncode == 0, result.stdout[-5000:]
    assert " passed" in result.stdout


PLANTED = {
    "as numpy": "weight.grad.numpy()",
    "compared with a tensor of the host": "assert torch.equal(weight.grad, weight.grad.cpu())",
    "host tensor for a backend of the device": "fused_orth_loss_foreach([weight, weight.cpu()], backend=backend)",
    "right": "assert weight.grad.cpu().numpy().shape == (6, 4, 3)",
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_seen(mistake: str, tmp_path: Path) -> None:
    """And only these: the same test without one passes."""
    code = f"""
import torch
from ocnn_fused import fused_orth_loss, fused_orth_loss_foreach


def test_it(backend):
    weight = torch.randn(6, 4, 3, requires_grad=True)
    fused_orth_loss(weight, backend=backend).backward()
    {PLANTED[mistake]}
"""
    file = tmp_path / "test_planted.py"  # outside the sources, which other tests read at the same time
    file.write_text(code)
    result = run("-p", "conftest", f"--config-file={HERE.parent / 'pyproject.toml'}", file)
    assert result.returncode == (0 if mistake == "right" else 1), result.stdout
    assert ("1 passed" if mistake == "right" else "1 failed") in result.stdout
