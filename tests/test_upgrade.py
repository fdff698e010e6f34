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


def test_everything_is_compiled_again(tmp_path: Path) -> None:
    (python, version, _), (other_python, other_version, other_torch) = facts(sys.executable), facts(str(OTHER))
    assert python == other_python, "both torches must be for one Python, else their builds never meet"
    assert version != other_version
    sources = copy_sources(tmp_path / "sources")
    log, compiler = tmp_path / "compiled", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    venv = make_venv(tmp_path / "venv", "torch", "numpy", "setuptools", "ninja", "wheel", "pybind11")
    scripts = Path(str(metadata.distribution("ninja").locate_file("../../../bin"))).resolve()
    environment = {
        "CXX": str(compiler),
        "OCNN_FUSED_CUDA": "0",
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "PWD": str(sources),
    }
    compiled = []
    for step in (version, other_version):
        if step is other_version:  # the same folder, as after `pip install torch==...`
            (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
            for installed in Path(other_torch).parent.iterdir():
                link = packages / installed.name
                if installed.name != "__pycache__" and "setuptools" not in installed.name:
                    link.unlink() if link.is_symlink() else None
                    link.symlink_to(installed)
        log.write_text("")
        done = run(venv, "setup.py", "--quiet", "build_ext", "--inplace", **environment)
        assert done.returncode == 0, done.stderr
        compiled.append(sorted(set(log.read_text().splitlines())))
        used = run(venv, "-c", USE, PWD=str(sources))
        assert used.stdout.split() == [step, step, "True"], used.stderr
    assert compiled[0]
    assert compiled[1] == compiled[0]
