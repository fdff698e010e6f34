"""Compiles the CUDA backend for the CPU, and runs plans there (tests/cuda_host)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cuda_toolkit
import torch
from oracle import Case

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
HOST = ROOT / "tests" / "cuda_host"
COMPILER = os.environ.get("CXX", "g++")

BUILDS = {
    "plain": ["-O1", "-ffp-contract=off"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
    "address": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
#: A sanitizer must be the first library of the process, and sees exceptions only if it finds libstdc++.
PRELOADED = {"plain": [], "thread": ["tsan", "stdc++"], "address": ["asan", "ubsan", "stdc++"]}
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1 history_size=0",
    "ASAN_OPTIONS": "detect_stack_use_after_return=0 detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

Edits = Mapping[str, Mapping[str, str]]  # by file: what stands there, and what shall stand there

#: Little memory, so that small weights are worked on as large ones are: 16 KB at once, copies of up to 1 KB.
LITTLE_MEMORY: Edits = {
    "cuda/orth_cuda.cu": {
        "kPlaneBytes = int64_t{128} << 20": "kPlaneBytes = 1 << 14",
        "kNarrowestChunk = 512": "kNarrowestChunk = 32",
        "kCopiedBytes = int64_t{1} << 20": "kCopiedBytes = 1 << 10",
    },
    # Parts of the workspace are kept apart for AddressSanitizer.
    "pipeline.h": {
        "    return reinterpret_cast<T*>(part);": "    used_ += cuda_host::fence(part, elements * sizeof(T), "
        "memory_ + used_);\n    return reinterpret_cast<T*>(part);"
    },
}
#: Every further type takes as long to compile.
FLOAT_ONLY: Edits = {
    "call.h": {f"<{types}>": "<float, float>" for types in ("double, double", "BFloat16, float", "Half, float")}
}


@cache
def nvcc() -> str | None:
    try:
        return str(cuda_toolkit.find_toolkit().nvcc)
    except cuda_toolkit.Unavailable:
        return None


def compile_module(folder: Path, build: str, *edits: Edits) -> Path:
    """The backend as a Python module of the CPU, in one of the ways of BUILDS, with changes of csrc/."""
    import pybind11

    shutil.copytree(CSRC, folder / "csrc")
    for changes in (LITTLE_MEMORY, *edits):
        for name, replacements in changes.items():
            path = folder / "csrc" / name
            text = path.read_text()
            for old, new in replacements.items():
                assert text.count(old) == 1, f"csrc/{name} has changed: {old!r}"
                text = text.replace(old, new)
            path.write_text(text)
    module = folder / f"{build}.so"
    includes = [f"-isystem{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    options = ["-std=c++20", "-shared", "-fPIC", *warnings, *BUILDS[build], *includes, f"-I{folder / 'csrc'}"]
    subprocess.run([COMPILER, *options, str(HOST / "module.cpp"), "-o", str(module)], check=True)
    return module


@dataclass(frozen=True)
class Run:
    """Equally shaped weights with one plan, and how to execute it."""

    name: str  # of the plan
    case: Case
    dtype: torch.dtype = torch.float32
    weights: int = 1
    with_grad: bool = True
    layout: str = "contiguous"  # or "channels_last", or "strided": nothing contiguous

    def __str__(self) -> str:
        extras = [f"{self.weights}w"] if self.weights > 1 else []
        extras += [] if self.with_grad else ["loss"]
        extras += [self.layout] if self.layout != "contiguous" else []
        return "-".join([self.name, str(self.case), str(self.dtype).removeprefix("torch."), *extras])

    def weights_laid_out(self) -> list[torch.Tensor]:
        return [self._lay_out(self.case.random(seed, self.dtype)) for seed in range(self.weights)]

    def _lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        if self.layout == "channels_last":
            order = (0, *range(2, weight.dim()), 1)
            return weight.permute(order).contiguous().permute(0, weight.dim() - 1, *range(1, weight.dim() - 1))
        if self.layout == "strided":
            larger = torch.full([2 * n + 1 for n in weight.shape], torch.nan, dtype=weight.dtype)
            view = larger[tuple(slice(1, None, 2) for _ in weight.shape)]
            return view.copy_(weight)
        return weight.contiguous()


class Said(NamedTuple):
    """What tests/cuda_host/run.py says of a run."""

    problems: list[str]
    bits: str
    issued: list[int]  # kernels, products


def execute(
    module: Path, runs: Sequence[Run], seed: int = 1, more: bool = False
) -> tuple[subprocess.CompletedProcess[str], dict[str, Said]]:
    """The finished process of tests/cuda_host/run.py, and what it said of every run."""
    pickled = module.with_suffix(".pickle")
    pickled.write_bytes(pickle.dumps(list(runs)))
    names = [f"-print-file-name=lib{name}.so" for name in PRELOADED[module.stem]]
    preloaded = [subprocess.check_output([COMPILER, name], text=True).strip() for name in names]
    folders = [str(HOST.parent), *(path or os.getcwd() for path in sys.path)]
    environment = {
        "PYTHONPATH": os.pathsep.join(folders),
        "LD_PRELOAD": os.pathsep.join(preloaded),
        "OMP_NUM_THREADS": "1",
        "OCNN_FUSED_DISABLE_EXTENSION": "1",
    }
    process = subprocess.run(
        [sys.executable, str(HOST / "run.py"), str(module), str(pickled), str(seed), str(int(more))],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return process, {name: Said(*rest) for name, *rest in map(json.loads, process.stdout.splitlines())}
