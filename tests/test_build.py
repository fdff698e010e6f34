"""What setup.py decides, says and refuses.

torch is the real one, in clean environments. A CUDA build of torch is too large to install here: where the suite runs
without one, ``FAKE_TORCH`` stands in for it, and ``make cuda-build`` runs the same tests against a real one, named by
OCNN_FUSED_TEST_CUDA_PYTHON. Toolkits are faked: a script that answers as nvcc does, and empty headers.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import cuda_toolkit
import pytest
import setuptools
import torch
from clean_venv import copy_sources, make_venv, torch_imported
from cuda_toolkit import Toolkit, Unavailable

import ocnn_fused

ROOT = Path(__file__).resolve().parent.parent

NVCC = """#!/bin/sh
case "$1" in
    --version) echo "Cuda compilation tools, release {version}, V{version}.61" ;;
    --dryrun) echo '#$ _SPACE_= ' >&2; echo '#$ TOP={home}/bin/..' >&2 ;;
    *) exit 1 ;;
esac
"""

#: As much of torch as setup.py asks; by path within the package.
FAKE_TORCH = {
    "__init__.py": """
from . import version
__version__ = version.__version__
def compiled_with_cxx11_abi(): return True
""",
    "version.py": """
__version__ = "2.99.0+cu128"
cuda = "12.8"
""",
    "utils/__init__.py": "",
    "utils/cpp_extension.py": """
import os
from setuptools import Extension
from setuptools.command.build_ext import build_ext

class BuildExtension(build_ext):
    @classmethod
    def with_options(cls, **options): return cls

def CppExtension(name, sources, **options): return Extension(name, sources)
CUDAExtension = CppExtension
def include_paths(device_type="cpu"): return []
def get_cxx_compiler(): return "c++"
def _get_cuda_arch_flags():
    flags = []
    for name in os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").split(";"):
        number, _, ptx = name.partition("+")
        if not number.replace(".", "").isdigit():
            raise ValueError(f"Unknown CUDA arch ({name}) or GPU not supported")
        number = number.replace(".", "")
        kinds = ("sm", "compute") if ptx else ("sm",)
        flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]
    return flags
""",
}


#: Of torch and of its CUDA.
Versions = tuple[str, cuda_toolkit.Version]


def make_toolkit(home: Path, version: str, headers: tuple[str, ...] = cuda_toolkit.LIBRARY_HEADERS) -> Path:
    """A folder that looks like a toolkit."""
    write_nvcc(home / "bin", NVCC.format(version=version, home=home))
    (home / "include").mkdir()
    for header in ("cuda_runtime.h", *headers):
        (home / "include" / header).touch()
    return home


def write_nvcc(folder: Path, script: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    return nvcc


def test_toolkit_named_by_the_environment(tmp_path: Path) -> None:
    first, second = (make_toolkit(tmp_path / version, version) for version in ("12.4", "13.1"))
    assert cuda_toolkit.find_toolkit({"CUDA_HOME": str(first)}) == Toolkit(first, (12, 4))
    assert cuda_toolkit.find_toolkit({"CUDA_PATH": str(second)}) == Toolkit(second, (13, 1))
    both = {"CUDA_HOME": str(first), "CUDA_PATH": str(second), "PATH": f"{second}/bin"}
    assert cuda_toolkit.find_toolkit(both).home == first


@pytest.mark.parametrize("way", ["itself", "a wrapper", "a link"])
def test_nvcc_on_path(way: str, tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda-12.8", "12.8")
    if way == "itself":
        path = home / "bin"
    elif way == "a wrapper":
        path = write_nvcc(tmp_path / "bin", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n').parent
    else:
        path = tmp_path / "bin"
        path.mkdir()
        (path / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert cuda_toolkit.find_toolkit({"PATH": str(path)}) == Toolkit(home, (12, 8))


def test_toolkit_in_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "USUAL_HOME", tmp_path / "cuda")
    with pytest.raises(Unavailable, match="CUDA_HOME is not set, and nvcc is not on PATH"):
        cuda_toolkit.find_toolkit({"PATH": str(tmp_path)})
    make_toolkit(tmp_path / "cuda", "12.6")
    assert cuda_toolkit.find_toolkit({"PATH": str(tmp_path)}) == Toolkit(tmp_path / "cuda", (12, 6))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho hello\n", "names no release"),
        ("#!/nowhere/sh\n", "does not run"),
        (NVCC.format(version="12.8", home="/nowhere"), "has no cuda_runtime.h beside it; set CUDA_HOME"),
    ],
)
def test_useless_nvcc(script: str, message: str, tmp_path: Path) -> None:
    write_nvcc(tmp_path / "bin", script)
    with pytest.raises(Unavailable, match=message):
        cuda_toolkit.find_toolkit({"CUDA_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((11, 8), "7.5;8.0;8.6;8.9;9.0+PTX"),
        ((12, 0), "7.5;8.0;8.6;8.9;9.0+PTX"),
        ((12, 6), "7.5;8.0;8.6;8.9;9.0+PTX"),
        ((12, 8), "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ((13, 0), "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ((14, 1), "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
    ],
)
def test_default_architectures(version: tuple[int, int], expected: str) -> None:
    assert cuda_toolkit.default_architectures(version) == expected


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "outcome"),
    [
        ((12, 8), "12.8", "fits"),
        ((12, 4), "12.8", "warning"),
        ((13, 0), "12.8", "mismatch"),
        ((12, 8), "13.0", "mismatch"),
        ((11, 8), "11.8", "too old"),
    ],
)
def test_versions_that_fit(toolkit: tuple[int, int], torch_cuda: str, outcome: str) -> None:
    found = Toolkit(Path("/cuda"), toolkit)
    both = rf"torch 2\.9 was built with CUDA {torch_cuda} and the toolkit is CUDA {cuda_toolkit.dotted(toolkit)}"
    if outcome == "mismatch":
        with pytest.raises(cuda_toolkit.Unavailable, match=both):
            cuda_toolkit.check_fits(found, "2.9", torch_cuda)
    elif outcome == "too old":
        with pytest.raises(Unavailable, match=r"the toolkit is CUDA 11\.8 in /cuda, and C\+\+20 needs CUDA 12\.0"):
            cuda_toolkit.check_fits(found, "2.9", torch_cuda)
    else:
        assert (cuda_toolkit.check_fits(found, "2.9", torch_cuda) is not None) == (outcome == "warning")


def test_headers_that_the_toolkit_lacks(tmp_path: Path) -> None:
    toolkit = Toolkit(make_toolkit(tmp_path / "cuda", "12.8", headers=("cusparse.h",)), (12, 8))
    packages = [tmp_path / "nvidia" / name for name in ("cudnn", "cublas", "cusolver", "cusparse")]
    for package, header in zip(packages, ("cudnn.h", "cublas_v2.h", "cusolverDn.h", "cusparse.h"), strict=True):
        (package / "include").mkdir(parents=True)
        (package / "include" / header).touch()
    folders = cuda_toolkit.library_include_folders(toolkit, packages)
    assert folders == [packages[1] / "include", packages[2] / "include"]
    with pytest.raises(Unavailable, match=r"cublas_v2\.h is neither in .*cuda nor in an nvidia package"):
        cuda_toolkit.library_include_folders(toolkit, packages[:1])


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, without setting up anything."""
    monkeypatch.setenv("OCNN_FUSED_BUILD_EXTENSION", "0")
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GB = 1 << 30

#: Files below the root, and the limits that they set: none, version 2 with and without groups in sight, version 1.
MEMORY = {
    "unlimited": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, []),
    "container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{5 * GB}\n"}, [5 * GB]),
    "below a slice": (
        {
            "proc/self/cgroup": "0::/user.slice/session-1\n",
            "sys/fs/cgroup/user.slice/session-1/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{9 * GB}\n",
        },
        [9 * GB],
    ),
    "hidden group": (
        {"proc/self/cgroup": "0::/docker/c0ffee\n", "sys/fs/cgroup/memory.max": f"{3 * GB}\n"},
        [3 * GB],
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/here\n4:memory:/docker/c0ffee\n",
            "sys/fs/cgroup/memory/docker/c0ffee/memory.limit_in_bytes": f"{4 * GB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        [4 * GB, 9223372036854771712],
    ),
    "no such files": ({}, []),
}


@pytest.mark.parametrize("world", MEMORY)
def test_memory_limits(world: str, setup_py: ModuleType, tmp_path: Path) -> None:
    files, limits = MEMORY[world]
    for name, text in {**files, "proc/meminfo": "MemFree: 9 kB\nMemAvailable:   2048 kB\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert list(setup_py.memory_limits(tmp_path)) == [2048 * 1024, *limits]


@pytest.mark.parametrize(
    ("given", "cores", "memory", "expected"),
    [
        (None, 8, [64 * GB], "8"),
        (None, 8, [64 * GB, 9 * GB], "4"),  # two gigabytes each
        (None, 8, [1 * GB], "1"),
        (None, 8, [], "8"),
        ("3", 8, [64 * GB], "3"),
    ],
)
def test_limit_jobs(
    given: str | None,
    cores: int,
    memory: list[int],
    expected: str,
    setup_py: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAX_JOBS", given or "")
    if given is None:
        monkeypatch.delenv("MAX_JOBS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(setup_py, "memory_limits", lambda: iter(memory))
    setup_py.limit_jobs()
    assert os.environ["MAX_JOBS"] == expected


@pytest.mark.parametrize(
    ("jobs", "cuda_files", "threads"), [("8", 1, 8), ("8", 3, 2), ("2", 1, 2), ("1", 2, 1), ("many", 1, 1)]
)
def test_threads_of_nvcc(
    jobs: str, cuda_files: int, threads: int, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All CUDA files together have no more threads than there are jobs, unless there are more files."""
    monkeypatch.setenv("MAX_JOBS", jobs)
    assert f"--threads={threads}" in setup_py.nvcc_flags(cuda_files)


def test_standard_is_named(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, older versions of torch add -std=c++17."""
    monkeypatch.setenv("MAX_JOBS", "1")
    assert "-std=c++20" in setup_py.flags()[0]
    assert "-std=c++20" in setup_py.nvcc_flags(1)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources") / "ocnn-fused")


#: As ``python setup.py --version``.
SETUP = """
import runpy, sys
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Environment:
    """A Python with torch, and the sources to build with it."""

    run: Callable[..., CompletedProcess[str]]
    sources: Path

    def setup(self, **environment: str) -> tuple[bool, str]:
        """Whether setup.py is content, and what it says; it decides before it compiles, and nothing is compiled."""
        done = self.run(SETUP, PWD=str(self.sources), **environment)
        output = done.stdout + done.stderr
        assert "Traceback" not in output, output
        assert done.returncode != 0 or ocnn_fused.__version__ in output.splitlines()
        return done.returncode == 0, output


@pytest.fixture(scope="module")
def cpu_torch(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    if torch.version.cuda is not None:
        pytest.skip("torch is a CUDA build here")
    with torch_imported(make_venv(tmp_path_factory.mktemp("cpu") / "venv", "torch", "setuptools", "ninja")) as run:
        yield Environment(run, sources)


@pytest.mark.slow
def test_cpu_torch_leaves_cuda_out(cpu_torch: Environment, tmp_path: Path) -> None:
    content, output = cpu_torch.setup(CUDA_HOME=str(make_toolkit(tmp_path / "cuda", "12.8")))
    assert content, output
    assert f"the CUDA backend is left out: torch {torch.__version__} is a CPU build\n" in output


@pytest.mark.slow
def test_cpu_torch_forced_on(cpu_torch: Environment, tmp_path: Path) -> None:
    content, output = cpu_torch.setup(OCNN_FUSED_CUDA="1", CUDA_HOME=str(make_toolkit(tmp_path / "cuda", "12.8")))
    assert not content
    expected = f"OCNN_FUSED_CUDA=1 asks for the CUDA backend, but torch {torch.__version__} is a CPU build"
    assert output.splitlines()[-1] == expected


@pytest.mark.slow
def test_cpu_torch_forced_off(cpu_torch: Environment) -> None:
    content, output = cpu_torch.setup(OCNN_FUSED_CUDA="0")
    assert content, output
    assert "the CUDA backend is switched off by OCNN_FUSED_CUDA=0\n" in output


@pytest.mark.slow
def test_neither_on_nor_off(cpu_torch: Environment) -> None:
    content, output = cpu_torch.setup(OCNN_FUSED_CUDA="yes")
    assert not content
    assert output.splitlines()[-1] == "OCNN_FUSED_CUDA must be 0 or 1, got 'yes'"


@pytest.mark.slow
def test_without_compiler(cpu_torch: Environment) -> None:
    content, output = cpu_torch.setup(CXX="/nowhere/c++")
    assert not content
    assert output.splitlines()[-1].startswith(
        "ocnn-fused needs a C++ compiler, and '/nowhere/c++' does not run (No such"
    )


def fake_torch(folder: Path) -> Path:
    """Python of a venv with FAKE_TORCH."""
    python = make_venv(folder, "setuptools")
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, text in FAKE_TORCH.items():
        path = packages / "torch" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return python


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def cuda_torch(
    request: pytest.FixtureRequest, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    if request.param == "fake":
        python = fake_torch(tmp_path_factory.mktemp("cuda") / "venv")
    elif not (python := os.environ.get("OCNN_FUSED_TEST_CUDA_PYTHON")):
        pytest.skip("OCNN_FUSED_TEST_CUDA_PYTHON names no Python with a CUDA build of torch")
    with torch_imported(python) as run:
        yield Environment(run, sources)


@pytest.fixture(scope="module")
def versions(cuda_torch: Environment) -> Versions:
    done = cuda_torch.run("import torch; print(torch.__version__, torch.version.cuda)")
    version, cuda = done.stdout.split()
    return version, cuda_toolkit.parse(cuda)


def test_cuda_torch_builds_where_a_toolkit_is_found(
    cuda_torch: Environment, versions: Versions, tmp_path: Path
) -> None:
    cuda = cuda_toolkit.dotted(versions[1])
    home = make_toolkit(tmp_path / "cuda", cuda)
    wrapper = write_nvcc(tmp_path / "bin", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n').parent
    content, output = cuda_torch.setup(PATH=f"{wrapper}{os.pathsep}{os.environ['PATH']}")
    assert content, output
    assert f"the CUDA backend is built with CUDA {cuda} in {home} for sm_75 sm_80 " in output
    assert f"{'sm_120 compute_120' if versions[1] >= (12, 8) else 'sm_90 compute_90'}\n" in output
    assert "warning" not in output


def test_cuda_torch_architectures_of_the_user(cuda_torch: Environment, versions: Versions, tmp_path: Path) -> None:
    home = str(make_toolkit(tmp_path / "cuda", cuda_toolkit.dotted(versions[1])))
    content, output = cuda_torch.setup(CUDA_HOME=home, TORCH_CUDA_ARCH_LIST="9.0+PTX 8.6")
    assert content, output
    assert f"in {home} for sm_86 sm_90 compute_90\n" in output
    content, output = cuda_torch.setup(CUDA_HOME=home, TORCH_CUDA_ARCH_LIST="8.0;Riva")
    assert not content
    assert "TORCH_CUDA_ARCH_LIST must be a list like '8.0;9.0+PTX', got '8.0;Riva' (Unknown CUDA arch (Riva)" in output


def test_cuda_torch_without_toolkit(cuda_torch: Environment, tmp_path: Path) -> None:
    content, output = cuda_torch.setup(CUDA_HOME=str(tmp_path))
    assert content, output
    missing = f"CUDA_HOME={tmp_path} contains no bin/nvcc"
    assert f"the CUDA backend is left out: {missing}\n" in output
    content, output = cuda_torch.setup(CUDA_HOME=str(tmp_path), OCNN_FUSED_CUDA="1")
    assert not content
    assert output.splitlines()[-1] == f"OCNN_FUSED_CUDA=1 asks for the CUDA backend, but {missing}"


def test_cuda_torch_forced_off(cuda_torch: Environment, tmp_path: Path) -> None:
    content, output = cuda_torch.setup(OCNN_FUSED_CUDA="0", CUDA_HOME=str(make_toolkit(tmp_path / "cuda", "1.0")))
    assert content, output
    assert "the CUDA backend is switched off by OCNN_FUSED_CUDA=0\n" in output


def test_another_major_version_is_left_out(cuda_torch: Environment, versions: Versions, tmp_path: Path) -> None:
    """Triton and the CPU need no toolkit."""
    version, (major, minor) = versions
    home = make_toolkit(tmp_path / "cuda", f"{major - 1}.4")
    why = (
        f"torch {version} was built with CUDA {major}.{minor} and the toolkit is CUDA {major - 1}.4 in {home}: "
        "their major versions must agree, so set CUDA_HOME to a toolkit that fits"
    )
    content, output = cuda_torch.setup(CUDA_HOME=str(home))
    assert content, output
    assert f"the CUDA backend is left out: {why}\n" in output
    content, output = cuda_torch.setup(CUDA_HOME=str(home), OCNN_FUSED_CUDA="1")
    assert not content
    assert output.splitlines()[-1] == f"OCNN_FUSED_CUDA=1 asks for the CUDA backend, but {why}"


@pytest.mark.parametrize("wish", ["", "1"])
def test_another_major_version_with_any_torch(wish: str, tmp_path: Path) -> None:
    """The same without a CUDA build: torch is told that it is one of CUDA 12."""
    home = make_toolkit(tmp_path / "cuda", "11.8")
    code = (
        "import runpy, sys, torch; torch.version.cuda = '12.8'; sys.argv = ['setup.py', '--quiet', '--version']; "
        f"runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='__main__')"
    )
    environment = {**os.environ, "CUDA_HOME": str(home), "OCNN_FUSED_CUDA": wish}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (wish == ""), done.stderr
    what = "OCNN_FUSED_CUDA=1 asks for the CUDA backend, but" if wish else "the CUDA backend is left out:"
    assert f"{what} torch {torch.__version__} was built with CUDA 12.8 and the toolkit is CUDA 11.8" in done.stderr
    # A CUDA build of torch itself adds, where there is no GPU, that it found no CUDA runtime.
    assert len([line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]) == 1


def test_another_minor_version_warns(cuda_torch: Environment, versions: Versions, tmp_path: Path) -> None:
    version, (major, minor) = versions
    home = make_toolkit(tmp_path / "cuda", f"{major}.{minor + 1}")
    content, output = cuda_torch.setup(CUDA_HOME=str(home))
    assert content, output
    both = f"torch {version} was built with CUDA {major}.{minor} and the toolkit is CUDA {major}.{minor + 1} in {home}"
    assert f"warning: {both}: " in output
    assert f"the CUDA backend is built with CUDA {major}.{minor + 1} in {home} for " in output
