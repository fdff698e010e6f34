"""Two processes and accumulation, each framework with its own way to distribute: the weights of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problem import assert_same, by_hand

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    ["lightning", "lightning-unused", "lightning-fsdp2", "transformers", "transformers-unused", "accelerate"],
)
def test_two_processes(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework.partition("-")[0])
    path = tmp_path / "weights.pt"
    script = Path(__file__).with_name("frameworks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launch, str(script), framework, str(path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert_same(torch.load(path), by_hand())
