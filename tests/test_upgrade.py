"""Another torch is installed where one was used: nothing that was compiled for the first may be used for the second.

Both torches are real. The second is that of OCNN_FUSED_TEST_OTHER_PYTHON; ``make test-upgrade`` sets it up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from clean_venv import copy_sources, make_venv, run

OTHER = os.environ.get("OCNN_FUSED_TEST_OTHER_PYTHON")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not OTHER, reason="OCNN_FUSED_TEST_OTHER_PYTHON names no Python with another torch"),
]

#: Notes what it compiles, then compiles it.
COMPILER = """#!/bin/sh
for word in "$@"; do case "$word" in *.cpp) echo "$word" >> {log} ;; esac; done
exec c++ "$@"
"""

#: Prints torch's version, the one the extension was built for, and whether it computes the reference's loss.
USE = """
import torch
from ocnn_fused import _extension, fused_orth_loss, reference
weight = torch.randn(6, 4, 3, 3, requires_grad=True)
assert _extension.module is not None, _extension.unavailable_reason
fused, plain = fused_orth_loss(weight, 2), reference.orth_loss(weight, 2)
gradients = [torch.autograd.grad(loss, weight)[0] for loss in (fused, plain)]
print(torch.__version__, _extension.build_info["torch"], torch.allclose(*gradients, rtol=1e-4, atol=1e-5))
"""


def facts(python: str) -> list[str]:
    code = "import sys, torch; print(sys.version_info[:2], torch.__version__, torch.__path__[0], sep='\\n')"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def exchange(python: Path, packages: Path) -> None:
    """In the venv of this Python, the torch of another environment with all that came with it, as pip would do it."""
    (here,) = python.parents[1].glob("lib/python*/site-packages")
    for old in here.glob("torch-*.dist-info"):
        old.unlink()
    for new in packages.iterdir():
        link = here / new.name
        if new.name != "__pycache__" and not new.name.startswith(("setuptools", "pip")):
            link.unlink(missing_ok=True)
            link.symlink_to(new)


def test_everything_is_compiled_again(tmp_path: Path) -> None:
    """``pip install --no-build-isolation .`` in one checkout, before and after another torch is installed."""
    (python, version, _), (other_python, other_version, other_torch) = facts(sys.executable), facts(str(OTHER))
    assert python == other_python, "both torches must be for one Python, else their builds never meet"
    assert version != other_version
    sources = copy_sources(tmp_path / "sources")
    log, compiler = tmp_path / "compiled", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    venv = make_venv(tmp_path / "venv", "torch", "numpy", "setuptools", "ninja", "wheel", "pybind11")
    scripts = Path(str(metadata.distribution("ninja").locate_file("../../../bin"))).resolve()
    environment = {"CXX": str(compiler), "OCNN_FUSED_CUDA": "0", "PATH": f"{scripts}:{os.environ['PATH']}"}
    install = ("install", "--no-build-isolation", "--no-deps", "--force-reinstall", sources)
    compiled = []
    for step in (version, other_version, other_version):
        if step is other_version:
            exchange(venv, Path(other_torch).parent)
        log.write_text("")
        done = run(sys.executable, "-m", "pip", "--python", venv, *install, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        compiled.append(sorted(log.read_text().splitlines()))
        used = run(venv, "-c", USE, PWD=str(tmp_path))
        assert used.stdout.split() == [step, step, "True"], used.stderr
    assert compiled[0]
    assert compiled[1] == compiled[0]
    assert not compiled[2]  # the same torch again: what was compiled for it is used
