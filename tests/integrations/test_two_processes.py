"""Two processes and accumulation, each framework with its own way to distribute: the weights of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from problem import assert_same, by_hand

ROOT = Path(__file__).resolve().parents[2]

FRAMEWORKS = {
    name: find_spec(name.partition("-")[0]) is not None
    for name in (
        "lightning",
        "lightning-unused",
        "lightning-fsdp2",
        "transformers",
        "transformers-unused",
        "accelerate",
    )
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the weights of every framework that is installed."""
    folder = tmp_path_factory.mktemp("weights")
    script = Path(__file__).with_name("frameworks.py")
    installed = [name for name, found in FRAMEWORKS.items() if found]
    run = subprocess.run(
        [sys.executable, str(script), str(folder), *installed],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=[] if found else pytest.mark.skip(f"needs {name.partition('-')[0]}"))
        for name, found in FRAMEWORKS.items()
    ],
)
def test_two_processes(framework: str, folder: Path) -> None:
    assert_same(torch.load(folder / f"{framework}.pt"), by_hand())
