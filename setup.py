"""Builds ``ocnn_fused._C`` from csrc/; everything that is not compiled is described in pyproject.toml.

Environment:
    OCNN_FUSED_BUILD_EXTENSION=0  pure Python package, needs neither torch nor a compiler
    OCNN_FUSED_CUDA=0 or 1        without the CUDA backend, or fail if it cannot be built; by default it is built where
                                  torch is a CUDA build and a toolkit is found, whether or not there is a GPU
    CUDA_HOME=folder              the toolkit; by default that of the nvcc on PATH, else /usr/local/cuda
    TORCH_CUDA_ARCH_LIST=list     GPUs to build for, for instance "8.0;9.0+PTX"; by default those of ARCHITECTURES in
                                  tools/cuda_toolkit.py that both CUDA versions know, the newest also as PTX
    OCNN_FUSED_SANITIZE=list      debug build for ``-fsanitize=list``, see ``make sanitize``
    MAX_JOBS=n                    compilers at once; by default as many as cores and memory allow
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036  pip looks at pyproject.toml; `python setup.py` comes here
    raise SystemExit(f"ocnn-fused needs Python 3.10 or newer, this is {platform.python_version()}")
try:
    import setuptools
except ModuleNotFoundError:
    raise SystemExit(
        "ocnn-fused is built with setuptools, which is not installed: run `pip install 'setuptools>=77.0.3'` first"
    ) from None

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_toolkit  # noqa: E402
from cuda_toolkit import Toolkit  # noqa: E402

BYTES_PER_JOB = 2 << 30  # what one compiler needs for torch's headers, generously
STANDARD = "-std=c++20"  # of our code; older versions of torch would ask for less
WITHOUT_CUDA = "set OCNN_FUSED_CUDA=0 to build without the CUDA backend"


#: Folders in which pip, build and uv make the environments that hide the user's packages from a build.
ISOLATED = re.compile(r"pip-build-env-|build-env-|[/\\]builds-v\d")


def require_tools() -> None:
    """End in one sentence if the environment cannot build the extension."""
    if not find_spec("torch") and any(map(ISOLATED.search, [sys.prefix, *sys.path])):
        raise SystemExit(
            "ocnn-fused is compiled against the torch you use, and an isolated build hides it: run "
            "`pip install --no-build-isolation .`, with torch, setuptools and ninja installed"
        )
    missing = [] if find_spec("torch") else ["torch"]
    if int(setuptools.__version__.split(".")[0]) < 77:
        missing.append("'setuptools>=77.0.3'")
    if not (shutil.which("ninja") or find_spec("ninja")):
        missing.append("ninja")
    if missing:
        raise SystemExit(
            f"ocnn-fused is compiled against the torch you use, and this environment lacks {' and '.join(missing)}: "
            f"run `pip install {' '.join(missing)}` first, then `pip install --no-build-isolation .`"
        )


def limit_jobs() -> None:
    """Set MAX_JOBS from the cores we may use and the memory we can have, unless the user did."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = min((memory // BYTES_PER_JOB for memory in memory_limits()), default=cores)
    os.environ.setdefault("MAX_JOBS", str(max(1, min(cores, fitting))))


def memory_limits(root: Path = Path("/")) -> Iterator[int]:
    """Bytes that the machine has left, and that its control groups (containers) allow this process."""
    # Not what is free: the cache of files, which Linux fills the rest with, counts as available.
    if kilobytes := re.search(r"MemAvailable:\s+(\d+)", text_of(root / "proc/meminfo")):
        yield int(kilobytes[1]) * 1024
    mounted = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2, version 1
            top, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
            group = top / path.lstrip("/")
            # A limit binds the groups below it. Within a container only the top may be visible.
            for folder in (group, *group.parents):
                limit = text_of(folder / name).strip()
                if limit.isdigit():
                    yield int(limit)
                if folder == top:
                    break


def text_of(path: Path) -> str:
    """Of a file that may not be there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def find_ninja() -> None:
    """Let torch find the ninja that pip installed; without activation a venv's scripts are not on PATH."""
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def say(message: str) -> None:
    print(f"ocnn-fused: {message}", file=sys.stderr)


def choose_toolkit() -> Toolkit | None:
    """The toolkit to build the CUDA backend with, or None to build without; says why, or ends the build."""
    wish = os.environ.get("OCNN_FUSED_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"OCNN_FUSED_CUDA must be 0 or 1, got {wish!r}")
    if wish == "0":
        say("the CUDA backend is switched off by OCNN_FUSED_CUDA=0")
        return None
    try:
        return find_fitting_toolkit()
    except cuda_toolkit.Unavailable as missing:
        if wish == "1":
            raise SystemExit(f"OCNN_FUSED_CUDA=1 asks for the CUDA backend, but {missing}") from None
        say(f"the CUDA backend is left out: {missing}")
        return None


def find_fitting_toolkit() -> Toolkit:
    """The toolkit, if it and torch allow the CUDA backend to be built."""
    import torch

    if torch.version.cuda is None:
        kind = "ROCm" if getattr(torch.version, "hip", None) else "CPU"
        raise cuda_toolkit.Unavailable(f"torch {torch.__version__} is a {kind} build")
    if os.environ.get("OCNN_FUSED_SANITIZE"):
        raise cuda_toolkit.Unavailable("OCNN_FUSED_SANITIZE is for the CPU")
    toolkit = cuda_toolkit.find_toolkit()
    warning = cuda_toolkit.check_fits(toolkit, torch.__version__, torch.version.cuda)
    if warning:
        say(f"warning: {warning}")
    cuda_toolkit.library_include_folders(toolkit)
    return toolkit


def architecture_flags(toolkit: Toolkit) -> list[str]:
    """What torch makes of TORCH_CUDA_ARCH_LIST, which gets our default where it is not set."""
    import torch
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    # A GPU that torch's own CUDA does not know cannot be used with this torch.
    common = min(toolkit.version, cuda_toolkit.parse(torch.version.cuda))
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_toolkit.default_architectures(common)
    try:
        return _get_cuda_arch_flags()
    except (ValueError, IndexError) as error:  # IndexError: "native", but there is no GPU
        wanted = os.environ["TORCH_CUDA_ARCH_LIST"]
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST must be a list like '8.0;9.0+PTX', got {wanted!r} ({error}); "
            f"unset it for the default, or {WITHOUT_CUDA}"
        ) from None


def sources(*patterns: str, cuda: bool) -> list[str]:
    """Files of csrc/ that match, those of csrc/cuda/ only if wanted, relative as setuptools wants them."""
    found = {path.relative_to(ROOT) for pattern in patterns for path in (ROOT / "csrc").rglob(pattern)}
    return sorted(path.as_posix() for path in found if cuda or path.parts[1] != "cuda")


def version() -> str:
    """The package's version, from the file that pyproject.toml reads as well."""
    facts: dict[str, str] = {}
    exec((ROOT / "ocnn_fused" / "_version.py").read_text(), facts)
    return facts["__version__"]


def flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags."""
    # at::parallel_for is an inline function: compiled without OpenMP it would run on one thread.
    common = ["-fopenmp"]
    compile_only = [STANDARD, "-fvisibility=hidden", "-Wall", "-Wextra"]
    sanitizers = os.environ.get("OCNN_FUSED_SANITIZE", "")
    if sanitizers:
        common.append(f"-fsanitize={sanitizers}")
        # Python's own flags may contain -fwrapv, which would hide signed overflow.
        compile_only += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-fno-wrapv"]
    else:
        compile_only += ["-O3", "-g0"]
    return common + compile_only, common


def nvcc_flags(cuda_files: int) -> list[str]:
    """Flags of nvcc, which shares the jobs out over architectures: the C++ files are done long before it."""
    jobs = os.environ["MAX_JOBS"]
    threads = max(1, int(jobs) // cuda_files) if jobs.isdigit() else 1
    return [STANDARD, "-O3", "-Xcompiler=-fvisibility=hidden", f"--threads={threads}"]


def compiler_version() -> str:
    """The first line in which the C++ compiler tells what it is."""
    from torch.utils.cpp_extension import get_cxx_compiler

    command = get_cxx_compiler()
    try:
        return subprocess.run([*command.split(), "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    except OSError as error:
        raise SystemExit(
            f"ocnn-fused needs a C++ compiler, and {command!r} does not run ({error.strerror}): install one, set CXX, "
            "or set OCNN_FUSED_BUILD_EXTENSION=0 to run its plans through PyTorch alone"
        ) from None


def extension(toolkit: Toolkit | None) -> tuple[Any, dict[str, Any]]:
    """The one extension module, and the facts of its build that go into build_info.json."""
    import torch
    from torch.utils.cpp_extension import CppExtension, CUDAExtension, include_paths

    cuda = toolkit is not None
    compile_flags, link_flags = flags()
    cpp_files, cuda_files = sources("*.cpp", cuda=cuda), sources("*.cu", cuda=cuda)
    architectures = architecture_flags(toolkit) if toolkit else []
    cuda_flags = nvcc_flags(len(cuda_files)) if toolkit else []
    # As system headers torch's are exempt from our warnings; so are those of the CUDA libraries, behind the toolkit's.
    folders = include_paths("cuda" if cuda else "cpu")
    folders += map(str, cuda_toolkit.library_include_folders(toolkit) if toolkit else [])
    facts = {
        "version": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda_toolkit.dotted(toolkit.version) if toolkit else None,
        "architectures": sorted(re.findall(r",code=(\w+)", " ".join(architectures)), key=architecture_order),
        "compiler": compiler_version(),
        "flags": " ".join(compile_flags),
        "nvcc_flags": " ".join(cuda_flags),
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
    }
    module = (CUDAExtension if cuda else CppExtension)(
        "ocnn_fused._C",
        [*cpp_files, *cuda_files],
        depends=[*sources("*.h", "*.inl", "*.cuh", cuda=cuda), "setup.py"],
        extra_compile_args={
            "cxx": [*compile_flags, *(f"-isystem{folder}" for folder in folders)],
            "nvcc": [*cuda_flags, *architectures, *(f"-isystem={folder}" for folder in folders)],
        },
        extra_link_args=link_flags,
    )
    return module, facts


def architecture_order(name: str) -> tuple[bool, int]:
    """sm_75 before sm_100, and compute_100, which is PTX, after both."""
    kind, number = name.split("_")
    return kind == "compute", int(re.sub(r"\D", "", number))


def identity(facts: dict[str, Any]) -> str:
    """Equal for builds whose objects fit together: ninja compares files and commands, but not torch's headers."""
    return hashlib.sha256(json.dumps({**facts, "version": None}, sort_keys=True).encode()).hexdigest()[:12]


def build_command(facts: dict[str, Any]) -> Any:
    """torch's build_ext, which then writes build_info.json next to the module."""
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension.with_options(use_ninja=True)):  # type: ignore[misc]
        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = os.path.join(self.build_temp, identity(facts))
            self.force = True  # setuptools would keep a module that is newer than our sources; ninja knows better

        def run(self) -> None:
            super().run()
            module = Path(self.get_ext_fullpath("ocnn_fused._C"))
            (module.parent / "build_info.json").write_text(json.dumps(facts, indent=2) + "\n")

    return Build


def arguments() -> dict[str, Any]:
    """What setup() needs beyond pyproject.toml."""
    wanted = os.environ.get("OCNN_FUSED_BUILD_EXTENSION", "1")
    if wanted not in ("0", "1"):
        raise SystemExit(f"OCNN_FUSED_BUILD_EXTENSION must be 0 or 1, got {wanted!r}")
    if wanted == "0":
        return {}
    require_tools()
    limit_jobs()
    find_ninja()
    toolkit = choose_toolkit()
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit.home)  # read when torch.utils.cpp_extension is imported
    module, facts = extension(toolkit)
    if toolkit:
        say(f"the CUDA backend is built with {toolkit} for {' '.join(facts['architectures'])}")
    return {"ext_modules": [module], "cmdclass": {"build_ext": build_command(facts)}}


setuptools.setup(**arguments())
