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
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from ocnn_fused.backends.triton.config import SHIPPED, SHIPPED_AMD, Config, single_config

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

# What the compiler for AMD would have to produce.
gpu_check._PRODUCT_LOOPS["gram"] = 2
amd = gpu_check.Job("gram", "ieee", SHIPPED_AMD["ieee"][0], "gfx942")
for count in (8, 16, 48, 52, 56):  # eight make a step
    outcome = gpu_check.Outcome(amd, 0.0, matrix=Counter({"v_mfma_f32_32x32x2_f32": count}))
    gpu_check._check_matrix_instructions(outcome, None)
    print(outcome.problems)
text = ".vgpr_count: 64\\n.private_segment_fixed_size: 0\\n.vgpr_spill_count: 1\\n.sgpr_spill_count: 2\\n"
outcome = gpu_check.Outcome(amd, 0.0)
gpu_check._read_amd(outcome, SimpleNamespace(asm={"amdgcn": text}), gpu_check.TARGETS["gfx942"])
print(outcome.spills, outcome.scalar_spills)

# A program that takes more tensor memory than there is.
single = gpu_check.Job("single", "tf32", single_config(SHIPPED["tf32"]), "sm_80")
gpu_check.tensor_columns = lambda compiled: 1024
print(gpu_check.check(single).problems)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_planted_mistakes_are_seen() -> None:
    """In a process of its own: here Triton interprets, there it compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent)])}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    right, shared, no_matrix, spilled, too_few, *amd, spills, does_not_fit = result.stdout.splitlines()
    assert right == "[]"
    assert "bytes of stack" in spilled
    assert "local accesses" in spilled
    assert shared.endswith("bytes of shared memory, limit 1024']")
    assert no_matrix == "['no matrix instruction']"
    assert too_few == "['matrix instructions of 2 tile steps, expected 3']"
    wrong = "['matrix instructions of {} tile steps, expected 2 to 6']"
    assert amd == [wrong.format(1), "[]", "[]", wrong.format(6.5), wrong.format(7)]
    assert spills == "1 2"
    assert does_not_fit == "['not one program fits on a multiprocessor']"
