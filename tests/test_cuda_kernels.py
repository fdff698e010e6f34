"""The CUDA backend without a GPU: executed on the CPU against the definition, and compiled for every architecture."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cuda_build
import pytest
import torch
from conftest import BACKENDS
from cuda_support import BUILDS, COMPILER, CSRC, FLOAT_ONLY, Run, Said, compile_module, execute, nvcc
from oracle import Case
from plans import plan_named

from ocnn_fused.backends.lowering import batches

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"the backend is compiled for the CPU by {COMPILER}"),
    pytest.mark.skipif("cpu" not in BACKENDS, reason="the compiled backends are left out"),
]

Module = Callable[[str], Path]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The backend as a Python module of the CPU, compiled once in each of the ways of BUILDS."""
    built: dict[str, Path] = {}

    def get(build: str) -> Path:
        if build not in built:
            built[build] = compile_module(tmp_path_factory.mktemp(build), build)
        return built[build]

    return get


HALVES = (torch.float16, torch.bfloat16)

RUNS = [
    Run("gram/row", Case((10, 20, 2, 2), stride=2)),
    Run("gram/row", Case((9, 70), groups=3), torch.float64),
    Run("gram/column", Case((70, 3, 1, 1)), torch.bfloat16),
    Run("toom/row", Case((17, 20, 3, 3))),
    Run("toom/row", Case((17, 20, 3, 3)), torch.float64),
    Run("toom/row", Case((17, 20, 3, 3)), torch.float16),
    Run("toom/row", Case((17, 20, 3, 3)), torch.bfloat16),
    Run("toom/row", Case((7, 5, 3, 3)), torch.float64, with_grad=False),
    Run("toom/row", Case((10, 70, 2, 2))),
    Run("toom/row", Case((6, 5, 3)), torch.float64, weights=3),
    Run("toom/row", Case((12, 3, 3, 3), groups=3), torch.float64, weights=2),
    Run("toom/row", Case((9, 5, 3, 3)), layout="channels_last"),
    Run("toom/row", Case((5, 4, 3, 2)), layout="strided"),
    Run("toom/row", Case((8, 6, 3, 3), stride=2), torch.float64),  # residue classes of several lengths
    Run("toom/row", Case((8, 6, 3, 3), stride=2), layout="channels_last", weights=2),
    Run("toom/row", Case((5, 4, 5, 5), padding=2)),  # dropped lags
    Run("toom/row", Case((6, 5, 5, 5)), torch.float64),  # mix in tiles of 4
    Run("toom/row", Case((3, 2, 4, 4, 4)), torch.float64),  # and of 2
    Run("toom/row", Case((4, 3, 2, 7)), torch.float64),  # points along one axis, lags along the other
    Run("toom/row", Case((6, 4, 3, 3), stride=2, dilation=2)),
    Run("toom/row", Case((4, 3, 3, 3, 3))),
    Run("toom/column", Case((30, 3, 7, 7), stride=2)),
    Run("toom/column", Case((30, 2, 3, 3)), torch.float64, weights=2),
    Run("toom/column", Case((70, 2, 3, 3)), torch.float64),
    Run("direct/row", Case((9, 5, 7))),
    Run("direct/row", Case((9, 5, 7)), torch.float16),
    Run("direct/row", Case((4, 3, 6, 7)), torch.float64, layout="channels_last"),
    Run("direct/row", Case((3, 2, 100)), torch.float64),  # taps that do not fit into shared memory
    Run("direct/row", Case((3, 2, 100)), torch.float64, layout="strided", with_grad=False),
    Run("direct/row", Case((50, 3, 2)), torch.float64),  # several runs of entries
    Run("direct/column", Case((20, 2, 7)), torch.float64),
    Run("small/row", Case((33, 1, 3, 3), groups=33)),
    Run("small/row", Case((33, 1, 3, 3), groups=33), torch.float16, weights=2),
    Run("small/row", Case((33, 1, 3, 3), groups=33), torch.bfloat16, with_grad=False),
    Run("small/row", Case((24, 2, 3, 3), stride=2, groups=6), torch.float64),
    Run("small/row", Case((8, 1, 7, 7), groups=4), layout="strided"),
    Run("small/row", Case((5, 3, 4), dilation=3), torch.float64, weights=2),
    Run("toom/row", Case((9, 5, 3, 3)), torch.float16, weights=3),
    Run("gram/column", Case((70, 3, 1, 1)), weights=2),
    Run("small/row", Case((33, 1, 3, 3), groups=33), weights=3, layout="strided"),
    Run("toom/row", Case((12, 3, 3, 3), groups=3, target="free"), torch.float64, weights=2),
    Run("toom/row", Case((9, 5, 3, 3), target="free"), layout="channels_last"),
    Run("toom/row", Case((9, 5, 3, 3), part="off_diagonal"), torch.float64),
    Run("toom/column", Case((60, 2, 3, 3), groups=2, target="free"), torch.float64, weights=2),
    Run("toom/column", Case((30, 2, 3, 3), target=0.5), torch.float16),
    Run("gram/row", Case((9, 2000), groups=3, target="free"), torch.float64),  # sums of several thread blocks
    Run("gram/column", Case((70, 3, 1, 1), target=2.0), torch.bfloat16),
    Run("gram/row", Case((20, 30), part="off_diagonal")),
    Run("direct/row", Case((9, 5, 7), target="free"), torch.float16),
    Run("direct/column", Case((20, 2, 7), target="free"), torch.float64, layout="strided"),
    Run("small/row", Case((33, 1, 3, 3), groups=33, target="free")),
    Run("small/row", Case((24, 2, 3, 3), stride=2, groups=6, target="free"), torch.float64, weights=2),
    Run("small/row", Case((24, 2, 3, 3), groups=6, target=3.0), torch.bfloat16),
    Run("small/row", Case((24, 2, 3, 3), groups=6, part="off_diagonal"), torch.float64),
    # What a launch takes, and what it does not.
    Run("toom/row", Case((5, 4, 3)), torch.float64, weights=67),
    Run("small/row", Case((8, 2, 3), groups=4), torch.float64, weights=65),
    Run("direct/row", Case((9, 8, 7), target="free"), torch.float64, weights=65),
    Run("toom/row", Case((4, 500, 3, 3)), torch.float64),
    Run("direct/row", Case((9, 5, 3, 7), stride=(1, 2)), torch.float64),
    Run("toom/row", Case((12, 5, 3, 3), stride=2, groups=2, target="free"), torch.bfloat16, weights=3),
    Run("gram/row", Case((8, 8)), weights=7),
    Run("gram/row", Case((8, 8)), torch.float16, weights=7),
    Run("gram/row", Case((16, 17)), weights=7),
]

#: Kernels and products of some of them, with 16 KB at once and copies of up to 1 KB: small equal weights share their
#: launches, also where the weight itself could serve as planes; large ones do not, and are cut into chunks.
ISSUED = {
    "gram/row-8x8-float32-7w": [4, 2],
    "gram/row-8x8-float16-7w": [4, 2],
    "gram/row-16x17-float32-7w": [8, 14],
    "small/row-8x2x3-g4-float64-65w": [4, 0],
}


@pytest.fixture(scope="module")
def said(module: Module) -> dict[str, Said]:
    process, said = execute(module("plain"), RUNS, seed=1, more=True)
    assert process.returncode == 0, process.stderr[-5000:]
    return said


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_results_match_the_definition(run: Run, said: dict[str, Said]) -> None:
    """Loss and gradient, alone and through every epilogue."""
    assert not said[str(run)].problems


def test_same_bits_in_any_order(module: Module, said: dict[str, Said]) -> None:
    """Of thread blocks and of threads."""
    process, again = execute(module("plain"), RUNS, seed=1000)
    assert process.returncode == 0, process.stderr[-5000:]
    assert {name: one.bits for name, one in again.items()} == {name: one.bits for name, one in said.items()}


@pytest.mark.parametrize("name", ISSUED)
def test_what_is_issued(name: str, said: dict[str, Said]) -> None:
    assert said[name].issued == ISSUED[name]


#: A few blocks of every kernel, and every way through them: a sanitizer makes them slow.
CHECKED = [
    Run("toom/row", Case((9, 8, 3)), torch.float32, weights=2),
    Run("toom/row", Case((9, 5, 3, 3), stride=2), torch.float64, layout="channels_last"),
    Run("toom/row", Case((6, 3, 3), groups=2), torch.bfloat16, weights=2),
    Run("toom/row", Case((5, 2, 5, 5)), torch.float64, with_grad=False),  # mix in tiles of 4
    Run("toom/row", Case((3, 2, 3, 3, 5)), torch.float64),  # and of 2
    Run("toom/column", Case((40, 2, 3)), torch.float32),
    Run("gram/row", Case((9, 20), groups=3), torch.float32, weights=2),
    Run("gram/column", Case((20, 3, 1, 1)), torch.float16),
    Run("direct/row", Case((5, 4, 7)), torch.float32),
    Run("direct/row", Case((5, 4, 7)), torch.float16, with_grad=False),
    Run("direct/row", Case((3, 2, 100)), torch.float64),
    Run("direct/column", Case((20, 2, 7), groups=2), torch.float32),
    Run("small/row", Case((33, 1, 3, 3), groups=33), torch.float32),
    Run("small/row", Case((10, 2, 3), groups=5), torch.bfloat16, weights=2),
    Run("small/row", Case((10, 2, 3), groups=5), torch.float64, with_grad=False),
]


@pytest.mark.parametrize("runs", [RUNS, CHECKED], ids=["plain", "sanitizers"])
def test_every_way_is_run(runs: list[Run]) -> None:
    """So that a change of the plans cannot empty the lists above."""
    plans = {run: plan_named(run.case, run.name) for run in runs}
    assert {run.name.split("/")[0] for run in runs} == {"gram", "toom", "direct", "small"}
    assert {run.name for run in runs} >= {"gram/column", "toom/column", "direct/column"}
    assert {run.dtype for run in runs} == {torch.float64, torch.float32, *HALVES}
    bilinear = {run: plan for run, plan in plans.items() if not plan.small}
    assert any(plan.side == "row" and any(run.summed for run in batches(plan).runs) for plan in bilinear.values())
    assert any(run.case.groups > 1 for run in bilinear)
    assert {(plan.small, run.with_grad) for run, plan in plans.items()} == {(a, b) for a in (0, 1) for b in (0, 1)}
    bytes_per_tile_element = {
        (plan.outputs + len(plan.lags)) * run.dtype.itemsize
        for run, plan in plans.items()
        if not plan.is_diagonal and run.dtype not in HALVES
    }
    for smallest, largest in ((0, 334), (335, 1203), (1204, 4010)):  # tiles of 8, 4 and 2 in 48 KB
        assert any(smallest <= size <= largest for size in bytes_per_tile_element), (smallest, largest)


@pytest.mark.parametrize("build", ["thread", "address"])
def test_sanitizers_find_nothing(build: str, module: Module) -> None:
    process, said = execute(module(build), CHECKED)
    assert process.returncode == 0, process.stderr[:5000]
    assert {name: one.problems for name, one in said.items()} == {str(run): [] for run in CHECKED}


class Bug(NamedTuple):
    """A mistake planted into csrc/cuda/kernels.cuh, what compiles them, and what it says."""

    code: str
    mistake: str
    build: str
    report: str


BUGS = {
    "missing barrier": Bug(
        "__syncthreads();\n  each(mix.outputs, [&](int, int, int, int here, int) {",
        "each(mix.outputs, [&](int, int, int, int here, int) {",
        "thread",
        r"ThreadSanitizer: data race[\s\S]*mix_kernel",
    ),
    "race of two blocks": Bug(
        "partials[blockIdx.x] = on_diagonal ? loss / 2 : loss;",
        "partials[0] += on_diagonal ? loss / 2 : loss;",
        "thread",
        r"ThreadSanitizer: data race[\s\S]*mix_kernel",
    ),
    "out of bounds": Bug(
        "if (first + q < block.planes) target[block.offset(first + q)]",
        "target[(first + q) * block.memory.plane_stride]",
        "address",
        r"AddressSanitizer: use-after-poison[\s\S]*evaluate_kernel",
    ),
    "divergent barrier": Bug(
        "if (thread < half) shared[thread] += shared[thread + half];\n    __syncthreads();",
        "if (thread < half) {\n      shared[thread] += shared[thread + half];\n      __syncthreads();\n    }",
        "plain",
        r"cuda_host: .*__syncthreads\(\)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    module = compile_module(tmp_path, bug.build, {"cuda/kernels.cuh": {bug.code: bug.mistake}}, FLOAT_ONLY)
    process, _ = execute(module, [Run("toom/row", Case((9, 8, 3)), weights=2)])
    assert process.returncode != 0
    assert re.search(bug.report, process.stderr), process.stderr[:5000]


def test_every_build_is_used() -> None:
    assert {bug.build for bug in BUGS.values()} == set(BUILDS)


#: What a process without cuBLAS says, and what is said of a matrix with more rows than an int counts.
BLAS = r"""
#include <cstdio>
#include "cuda/blas.h"
using namespace ocnn_fused;
int main() {
  for (const int64_t rows : {int64_t{3}, int64_t{1} << 31}) {
    const Matrices<float> out{nullptr, 1, 0, rows, 2, 2, 1}, left{nullptr, 1, 0, rows, 4, 4, 1};
    try {
      cuda::multiply_by_blas(0, out, left, {nullptr, 1, 0, 4, 2, 2, 1}, false);
    } catch (const std::exception& error) {
      std::puts(error.what());
    }
  }
}
"""


def test_errors_of_products(tmp_path: Path) -> None:
    (tmp_path / "blas.cpp").write_text(BLAS)
    program = tmp_path / "blas"
    subprocess.run([COMPILER, "-std=c++20", f"-I{CSRC}", str(tmp_path / "blas.cpp"), "-o", str(program)], check=True)
    assert subprocess.check_output([program], text=True).splitlines() == [
        "cuBLAS is not loaded: no library of this process has cublasSgemmStridedBatched",
        "a product is too large for cuBLAS: 2147483648",
    ]


ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc, which is not on PATH")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_kernels_do_not_spill(architecture: int, tmp_path: Path) -> None:
    """No stack, no spilled register, and shared memory asked for at the launch only."""
    supported = subprocess.run([nvcc(), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if f"sm_{architecture}" not in supported:
        pytest.skip(f"this nvcc does not compile for sm_{architecture}")
    process = subprocess.run(
        [nvcc(), "-std=c++20", f"-arch=sm_{architecture}", "-cubin", "-Xptxas=-v", "-Werror=all-warnings"]
        + [str(CSRC / "cuda" / "orth_cuda.cu"), "-o", str(tmp_path / "kernels.cubin")],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    compiled = set(re.findall(r"Compiling entry function '(\w+)'", process.stderr))
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers(.*)",
        process.stderr,
    )
    assert len(compiled) == len(frames) == 28  # 4 for four types, 6 for two
    for stack, stores, loads, registers, rest in frames:
        assert (stack, stores, loads) == ("0", "0", "0"), process.stderr
        assert int(registers) <= 128
        assert "smem" not in rest


@pytest.mark.skipif(nvcc() is None, reason="needs nvcc, which is not on PATH")
def test_stacks_of_a_module_are_seen(tmp_path: Path) -> None:
    """tools/cuda_build.py looks into what was built: two architectures, with and without a stack."""
    try:
        cuda_build.cuobjdump()
    except SystemExit as missing:
        pytest.skip(str(missing))
    source, module = tmp_path / "kernels.cu", tmp_path / "module.so"
    source.write_text(
        """
        extern "C" __global__ void lean(float* x) { x[threadIdx.x] = 0; }
        extern "C" __global__ void greedy(float* x, const int* at) {
          volatile float kept[100];
          for (int i = 0; i < 100; ++i) kept[at[i]] = x[i];
          x[threadIdx.x] = kept[at[threadIdx.x]];
        }
        """
    )
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)]
    options = ["-shared", "-cudart=none", "-Xcompiler=-fPIC"]
    subprocess.run([nvcc(), *codes, *options, str(source), "-o", str(module)], check=True)
    assert cuda_build.stacks(module) == {"lean": [0, 0], "greedy": [400, 400]}
    assert cuda_build.embedded(module) == {"sm_80", "sm_90"}
