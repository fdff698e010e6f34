"""``make gpu-check`` must see what it is there for: each mistake is planted in one kernel, and one kernel has none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"

CODE = """
import gpu_check
from dataclasses import replace
from ocnn_fused.backends.triton.config import SHIPPED, Config

good = gpu_check.Job("gram", "tf32", SHIPPED["tf32"][0], "sm_80")
target = gpu_check.TARGETS["sm_80"]
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = replace(target, shared_bytes=1024)
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = replace(target, matrix="UTCHMMA")
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = target
print(gpu_check.check(gpu_check.Job("gram", "ieee", Config(block=128, depth=16, warps=4), "sm_80")).problems)
gpu_check._PRODUCT_LOOPS["gram"] = 3
print(gpu_check.check(good).problems)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_planted_mistakes_are_seen() -> None:
    """In a process of its own: here Triton interprets, there it compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent)])}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    right, shared, no_matrix, spilled, too_few = result.stdout.splitlines()
    assert right == "[]"
    assert "bytes of stack" in spilled
    assert "local accesses" in spilled
    assert shared.endswith("bytes of shared memory, limit 1024']")
    assert no_matrix == "['no matrix instruction']"
    assert too_few == "['matrix instructions of 2 tile steps, expected 3']"
