"""How the CPU backend shares out its work: nothing left out, no race, and the same bits on any number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BACKENDS
from cuda_support import BUILDS, ENVIRONMENT
from test_cpu_backend import run_python

ROOT = Path(__file__).resolve().parent.parent
HEADER, HARNESS = ROOT / "csrc" / "cpu" / "sharing.h", ROOT / "tests" / "cpu_host" / "run_sharing.cpp"
COMPILER = os.environ.get("CXX", "g++")

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not there")


def compiled_harness(folder: Path, build: str, header: str) -> Path:
    """With this text in place of csrc/cpu/sharing.h."""
    source, program = folder / "run_sharing.cpp", folder / "run_sharing"
    (folder / "sharing.h").write_text(header)
    source.write_text(HARNESS.read_text().replace("../../csrc/cpu/sharing.h", "sharing.h"))
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", *BUILDS[build]]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    return program


def run_harness(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, check=False, env=os.environ | ENVIRONMENT)


@needs_compiler
@pytest.mark.parametrize("build", ["thread", "address"])
def test_sharing_under_sanitizers(build: str, tmp_path: Path) -> None:
    result = run_harness(compiled_harness(tmp_path, build, HEADER.read_text()))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ok\n"


@needs_compiler
def test_the_thread_sanitizer_sees_a_missing_order(tmp_path: Path) -> None:
    """Else the test above would show nothing. Threads that happen to run one after the other race with nobody."""
    ordered = "done.fetch_add(1, std::memory_order_release)"
    assert HEADER.read_text().count(ordered) == 1
    header = HEADER.read_text().replace(ordered, ordered.replace("release", "relaxed"))
    program = compiled_harness(tmp_path, "thread", header)
    results = (run_harness(program) for _ in range(50))
    assert any(result.returncode != 0 and "data race" in result.stderr for result in results)


#: Layers large enough to be shared out: one alone, several of a shape (an even number and not), groups, both sides.
BITS = """
import hashlib, torch
from ocnn_fused import fused_orth_loss_foreach
torch.set_num_threads({threads})
for shape, stride, groups, count in [
    ((64, 64, 3, 3), 1, 1, 1), ((64, 48, 3, 3), 1, 1, 5), ((128, 128, 3, 3), 1, 1, 3), ((280, 64, 3, 3), 2, 1, 1),
    ((160, 40, 3, 3), 1, 4, 3), ((130, 40, 5, 5), 1, 1, 2), ((24, 60, 3, 3, 3), 1, 1, 2), ((512, 1, 5, 5), 1, 512, 3),
    ((530, 900, 1, 1), 1, 1, 1), ((1200, 260, 1, 1), 1, 1, 1), ((130, 200, 1, 1), 1, 1, 5),
]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).mul_(0.05).requires_grad_() for _ in range(count)]
    for repeat in range(3):
        losses = fused_orth_loss_foreach(weights, stride, groups=groups, backend="cpu")
        everything = [losses.detach(), *torch.autograd.grad(losses.sum(), weights)]
        print(shape, hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in everything)).hexdigest())
"""


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backend is left out")
def test_same_bits_on_any_number_of_threads() -> None:
    """Of all that is multiplied on panels or in small groups; a BLAS may add in another order."""
    one, *others = (run_python(BITS.format(threads=threads)) for threads in (1, 2, 3, 8))
    assert len(one.splitlines()) == 33
    assert all(other == one for other in others)
