"""Compiles csrc/cuda/kernels.cuh for the CPU and for GPUs, and runs plans on the former (tests/cuda_host)."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cuda_toolkit
import numpy as np
import torch
from oracle import Case, loss_and_grad
from plans import plan_named

from ocnn_fused.backends.lowering import lower

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "cuda" / "kernels.cuh"
HOST = ROOT / "tests" / "cuda_host"

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # in the order in which run_cases numbers them

BUILDS = {
    "plain": ["-O1", "-ffp-contract=off"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
    "address": ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1 history_size=0",
    "ASAN_OPTIONS": "detect_stack_use_after_return=0 detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


@cache
def nvcc() -> str | None:
    try:
        return str(cuda_toolkit.find_toolkit().nvcc)
    except cuda_toolkit.Unavailable:
        return None


@cache
def half_headers() -> Path | None:
    """The toolkit's folder with cuda_fp16.h."""
    include = cuda_toolkit.find_toolkit().include if nvcc() else None
    return include if include and (include / "cuda_fp16.h").is_file() else None


def compile_host(folder: Path, build: str, kernels: Path = KERNELS, float_only: bool = False) -> Path:
    """The program run_cases, in one of the ways of BUILDS, for the kernels in a given file called kernels.cuh.

    Every further type takes as long to compile; half precision is left out where there are no headers for it.
    """
    program = folder / f"run_cases_{build}"
    headers = None if float_only else half_headers()
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Wno-unknown-pragmas",
            *BUILDS[build],
            f"-I{kernels.parent}",
            f"-I{kernels.parent.parent}",
            *([f"-isystem{headers}"] if headers else []),
            *(["-DFLOAT_ONLY"] if float_only else []),
            str(HOST / "run_cases.cpp"),
            "-o",
            str(program),
        ],
        check=True,
    )
    return program


def compile_ops(folder: Path) -> Path:
    """csrc/cuda/orth_cuda.cu as a library of ops that run on the CPU, through tests/cuda_host and its stubs.

    It is compiled for AddressSanitizer.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    source = KERNELS.with_name("orth_cuda.cu").read_text()
    launch = (
        "cuda_host::launch(1, geometry.thread_blocks, geometry.threads, geometry.shared_bytes, kernel, arguments...);"
    )
    source, launches = re.subn(r"kernel<<<[\s\S]*?>>>\(arguments\.\.\.\);", launch, source)
    assert launches == 1, "orth_cuda.cu no longer launches its kernels in one place"
    # Little memory, so that small weights are worked on as large ones are.
    for allowed, less in {
        "kPlaneBytes = int64_t{128} << 20": "kPlaneBytes = 1 << 14",
        "kNarrowestChunk = 512": "kNarrowestChunk = 32",
        "kCopiedBytes = int64_t{1} << 20": "kCopiedBytes = 1 << 10",
    }.items():
        assert source.count(allowed) == 1
        source = source.replace(allowed, less)
    # The package's own extension is loaded too, and has made the type known.
    source += "void ocnn_fused::register_plan_type() {}\n"
    (folder / "orth_cuda.cpp").write_text(source)
    folders = [HOST / "stubs", KERNELS.parent, KERNELS.parent.parent]
    library = folder / "orth_cuda.so"
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++20",
            *BUILDS["address"],
            "-shared",
            "-fPIC",
            "-Wno-unknown-pragmas",
            "-include",
            str(HOST / "cuda_host.h"),
            *(f"-I{path}" for path in folders),
            *(f"-isystem{path}" for path in include_paths()),
            str(folder / "orth_cuda.cpp"),
            *(f"-L{path}" for path in library_paths()),
            "-lc10",
            "-ltorch_cpu",
            "-o",
            str(library),
        ],
        check=True,
    )
    return library


def run_ops(library: Path) -> subprocess.CompletedProcess[str]:
    """tests/cuda_host/run_ops.py with the ops of a library."""
    folders = [str(HOST.parent), *(path or os.getcwd() for path in sys.path)]
    # AddressSanitizer must be the first library of the process, and sees exceptions only if it finds libstdc++.
    names = [f"-print-file-name=lib{name}.so" for name in ("asan", "ubsan", "stdc++")]
    preloaded = [subprocess.check_output([os.environ.get("CXX", "g++"), name], text=True).strip() for name in names]
    environment = {"PYTHONPATH": os.pathsep.join(folders), "LD_PRELOAD": os.pathsep.join(preloaded)}
    return subprocess.run(
        [sys.executable, str(HOST / "run_ops.py"), str(library)],
        env={**os.environ, **ENVIRONMENT, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@dataclass(frozen=True)
class Run:
    """One bucket of equally shaped weights with one plan, and how to execute it."""

    name: str  # of the plan
    case: Case
    dtype: torch.dtype = torch.float32
    weights: int = 1
    with_grad: bool = True
    layout: str = "contiguous"  # or "channels_last", or "strided": nothing contiguous
    chunk: int = 0  # length of the pieces into which the contraction is cut
    interleaved: bool = False
    adds: bool = False  # gradients times -(weights - w)/2 to ones, w the place of the weight

    def __str__(self) -> str:
        extras = [f"{self.weights}w"] if self.weights > 1 else []
        extras += [] if self.with_grad else ["loss"]
        extras += [self.layout] if self.layout != "contiguous" else []
        extras += [f"chunk{self.chunk}"] if self.chunk else []
        extras += ["interleaved"] if self.interleaved else []
        extras += ["adds"] if self.adds else []
        return "-".join([self.name, str(self.case), str(self.dtype).removeprefix("torch."), *extras])

    def tensors(self) -> list[torch.Tensor]:
        return [self._lay_out(self.case.random(seed, self.dtype)) for seed in range(self.weights)]

    def _lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        if self.layout == "channels_last":
            order = (0, *range(2, weight.dim()), 1)
            return weight.permute(order).contiguous().permute(0, weight.dim() - 1, *range(1, weight.dim() - 1))
        if self.layout == "strided":
            larger = torch.full([2 * n + 1 for n in weight.shape], 7.0, dtype=weight.dtype)
            view = larger[tuple(slice(1, None, 2) for _ in weight.shape)]
            return view.copy_(weight)
        return weight.contiguous()

    def pack(self) -> bytes:
        """The case as run_cases reads it: 64-bit integers and doubles."""
        plan = plan_named(self.case, self.name)
        tensors = self.tensors()
        like = tensors[0]
        packer = Packer()
        packer.integers(DTYPES.index(self.dtype), plan.small, self.with_grad, self.adds)
        packer.integers(plan.groups, plan.rows, plan.channels)
        packer.integers(like.stride(0), like.stride(1))
        packer.array(like.shape[2:] or [1])
        packer.array(like.stride()[2:] or [1])
        packer.integers(len(tensors))
        for tensor in tensors:
            packer.reals(span_of(tensor))
        lowered = lower(plan, torch.float64)
        packer.array(lowered.layout.tolist())
        if lowered.constants is not None:
            packer.reals(lowered.constants.tolist())
            packer.integers(self.chunk, self.interleaved)
        return packer.bytes

    def result_sizes(self) -> tuple[int, int]:
        """How many losses, and how many numbers each gradient's memory has."""
        return self.weights, len(span_of(self.tensors()[0])) if self.with_grad else 0


class Packer:
    def __init__(self) -> None:
        self.bytes = b""

    def integers(self, *values: int) -> None:
        self.bytes += struct.pack(f"{len(values)}q", *values)

    def array(self, values: Sequence[int]) -> None:
        self.integers(len(values), *values)

    def reals(self, values: Sequence[float]) -> None:
        self.integers(len(values))
        self.bytes += struct.pack(f"{len(values)}d", *values)


def span_of(tensor: torch.Tensor) -> list[float]:
    """Memory from the first to the last element of a tensor."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided([length], [1]).double().tolist()


def execute(
    program: Path, runs: Sequence[Run], folder: Path, seed: int = 1
) -> tuple[subprocess.CompletedProcess[str], np.ndarray]:
    """The finished process and all numbers that it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input").write_bytes(b"".join(run.pack() for run in runs))
    process = subprocess.run(
        [str(program), str(folder / "input"), str(folder / "output"), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        timeout=900,
    )
    return process, np.fromfile(folder / "output") if (folder / "output").exists() else np.empty(0)


def worst_error(run: Run, losses: np.ndarray, grads: np.ndarray) -> float:
    """Of all losses, relative to max(1, loss), and gradients, relative to their largest entry; NaN is infinite."""
    worst = 0.0
    for place, (weight, loss, grad) in enumerate(zip(run.tensors(), losses, grads, strict=True)):
        expected_loss, expected_grad = loss_and_grad(weight, run.case)
        if run.adds:
            expected_grad = 1 - 0.5 * (run.weights - place) * expected_grad
        worst = max(worst, _finite(abs(loss - expected_loss) / max(1.0, expected_loss)))
        if run.with_grad:
            actual = torch.as_strided(torch.from_numpy(grad.copy()), weight.shape, weight.stride()).numpy()
            worst = max(worst, _finite(abs(actual - expected_grad).max() / abs(expected_grad).max()))
    return worst


def _finite(value: float) -> float:
    return float(value) if value == value else float("inf")


def errors_of(runs: Sequence[Run], numbers: np.ndarray) -> dict[str, float]:
    """The worst error of every run, from the numbers that run_cases wrote."""
    errors, position = {}, 0
    for run in runs:
        count, length = run.result_sizes()
        losses = numbers[position : position + count]
        grads = numbers[position + count : position + count * (1 + length)].reshape(count, length)
        position += count * (1 + length)
        errors[str(run)] = worst_error(run, losses, grads)
    assert position == len(numbers), "run_cases wrote another number of results"
    return errors
