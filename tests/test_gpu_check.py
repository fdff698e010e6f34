"""``make gpu-check`` must see what it is there for: each mistake is planted in one kernel, and one kernel has none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"

CODE = """
import re
import gpu_check
from dataclasses import replace
from types import SimpleNamespace
from ocnn_fused.backends.triton.config import SHIPPED, SHIPPED_AMD, Config

good = gpu_check.Job("gram", "tf32", SHIPPED["tf32"][0], "sm_80")
target = gpu_check.TARGETS["sm_80"]
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = replace(target, shared_bytes=1024)
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = replace(target, matrix="UTCHMMA")
print(gpu_check.check(good).problems)
gpu_check.TARGETS["sm_80"] = target
print(gpu_check.check(gpu_check.Job("gram", "ieee", Config(tile=128, depth=16, warps=4), "sm_80")).problems)

# Loops that the compiler has taken apart: a step too few, a work item too many, an instruction less than in the IR.
for target, precision, shipped in (("sm_100", "tf32", SHIPPED), ("gfx942", "ieee", SHIPPED_AMD)):
    if gpu_check.lacks_linker(gpu_check.TARGETS[target]):
        continue
    job = gpu_check.Job("gram", precision, shipped[precision][0], target)
    compiled = gpu_check.compile_job(job)
    outcome = gpu_check.check(job)
    print(outcome.problems)
    module = compiled.asm["llir"]
    wrong = [
        re.sub(r"i1 %\\w+\\) #", "i1 false) #", module)  # predicates of the matrix instructions, first of all
        if target == "sm_100"
        else re.sub(r"(icmp sgt i32 %\\w+), 0", r"\\1, 16", module),  # whether there is a first step
        re.sub(r"(\\n[^\\n]*(?:tcgen05.mma|call[^\\n]*mfma)[^\\n]*)", "", module, count=1),
    ]
    for text in wrong:
        again = gpu_check.Outcome(job, 0.0, matrix=outcome.matrix)
        gpu_check._check_matrix_instructions(again, text)
        print(again.problems)
amd = gpu_check.Job("gram", "ieee", SHIPPED_AMD["ieee"][0], "gfx942")
text = ".vgpr_count: 64\\n.private_segment_fixed_size: 0\\n.vgpr_spill_count: 1\\n.sgpr_spill_count: 2\\n"
outcome = gpu_check.Outcome(amd, 0.0)
gpu_check._read_amd(outcome, SimpleNamespace(asm={"amdgcn": text}), gpu_check.TARGETS["gfx942"])
print(outcome.spills, outcome.scalar_spills)

# No rounding where TF32 promises one, and bars that nothing can meet.
class Unrounded(gpu_check.Job):
    @property
    def constants(self):
        return {**super().constants, "TF32": False}

print(gpu_check.check(Unrounded("evaluate", "tf32", SHIPPED["tf32"][0], "sm_80")).problems)
gather = gpu_check.Job("gather", "ieee", SHIPPED["ieee"][0], "sm_80")
print(gpu_check.check(gather).problems)
gpu_check.BARS["gather"] = gpu_check.Bar(instructions=16, programs=99, wide=1.0)
print(gpu_check.check(gather).problems)

# A program that takes more tensor memory than there is.
gpu_check.tensor_columns = lambda compiled: 1024
print(gpu_check.check(good).problems)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_planted_mistakes_are_seen() -> None:
    """In a process of its own: here Triton interprets, there it compiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent)])}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    right, shared, no_matrix, spilled, *taken_apart, spills, unrounded, within, beyond, does_not_fit = lines
    assert re.fullmatch(r"\['0 roundings to TF32, \d+ operands are stored'\]", unrounded)
    assert within == "[]"
    assert re.fullmatch(
        r"\['\d programs fit on a multiprocessor, wanted 99', '\d+ instructions per tap, at most 16 are wanted', "
        r"'0% copied 16 bytes at a time, at least 100% are wanted'\]",
        beyond,
    )
    assert right == "[]"
    assert "bytes of stack" in spilled
    assert "local accesses" in spilled
    assert shared.endswith("bytes of shared memory, limit 1024']")
    assert no_matrix == "['no matrix instruction']"
    assert len(taken_apart) in (3, 6)
    for as_compiled, step_missing, instruction_missing in zip(*[iter(taken_apart)] * 3, strict=True):
        assert as_compiled == "[]"
        assert re.fullmatch(r"\['\d+ multiply-adds are executed, the plans have \d+'\]", step_missing)
        assert re.match(r"\['\d+ matrix instructions, but \d+ in LLVM IR', '\d+ multiply-adds", instruction_missing)
    assert spills == "1 2"
    assert does_not_fit == "['not one program fits on a multiprocessor']"
