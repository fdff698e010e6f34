"""Builds ``ocnn_fused._C`` from csrc/; everything that is not compiled is described in pyproject.toml.

Environment:
    OCNN_FUSED_BUILD_EXTENSION=0  pure Python package, needs neither torch nor a compiler
    OCNN_FUSED_SANITIZE=list      debug build for ``-fsanitize=list``, see ``make sanitize``
    MAX_JOBS=n                    compilers at once; by default as many as cores and memory allow
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import setuptools

ROOT = Path(__file__).resolve().parent
BYTES_PER_JOB = 2 << 30  # what one compiler needs for torch's headers, generously


def require_tools() -> None:
    """End in one sentence if the environment cannot build the extension."""
    missing = [] if find_spec("torch") else ["torch"]
    if int(setuptools.__version__.split(".")[0]) < 77:
        missing.append("'setuptools>=77.0.3'")
    if missing:
        raise SystemExit(
            f"ocnn-fused is compiled against the torch you use, and this environment lacks {' and '.join(missing)}: "
            f"run `pip install {' '.join(missing)}` first, then `pip install --no-build-isolation .`"
        )


def limit_jobs() -> None:
    """Set MAX_JOBS from the cores we may use and the free memory, unless the user did."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        free = cores * BYTES_PER_JOB
    os.environ.setdefault("MAX_JOBS", str(max(1, min(cores, free // BYTES_PER_JOB))))


def sources(*patterns: str) -> list[str]:
    """Files of csrc/ that match, without those of GPU backends, relative as setuptools wants them."""
    found = {path.relative_to(ROOT) for pattern in patterns for path in (ROOT / "csrc").rglob(pattern)}
    return sorted(path.as_posix() for path in found if path.parts[1] != "cuda")


def version() -> str:
    """The package's version, from the file that pyproject.toml reads as well."""
    facts: dict[str, str] = {}
    exec((ROOT / "ocnn_fused" / "_version.py").read_text(), facts)
    return facts["__version__"]


def flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags; torch adds the -std its headers need."""
    # at::parallel_for is an inline function: compiled without OpenMP it would run on one thread.
    common = ["-fopenmp"]
    compile_only = ["-fvisibility=hidden", "-Wall", "-Wextra"]
    sanitizers = os.environ.get("OCNN_FUSED_SANITIZE", "")
    if sanitizers:
        common.append(f"-fsanitize={sanitizers}")
        # Python's own flags may contain -fwrapv, which would hide signed overflow.
        compile_only += ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-fno-wrapv"]
    else:
        compile_only += ["-O3", "-g0"]
    return common + compile_only, common


def extension() -> Any:
    """The one extension module, with the facts of its build compiled in."""
    import torch
    from torch.utils.cpp_extension import CppExtension, include_paths

    compile_flags, link_flags = flags()
    facts = {
        "OCNN_FUSED_VERSION": version(),
        "OCNN_FUSED_TORCH_VERSION": torch.__version__,
        "OCNN_FUSED_FLAGS": " ".join(compile_flags),
    }
    # As system headers torch's are exempt from our warnings.
    quiet = [f"-isystem{path}" for path in include_paths()]
    return CppExtension(
        "ocnn_fused._C",
        sources("*.cpp"),
        depends=[*sources("*.h", "*.inl"), "setup.py"],
        define_macros=[(name, f'"{value}"') for name, value in facts.items()],
        extra_compile_args=compile_flags + quiet,
        extra_link_args=link_flags,
    )


def arguments() -> dict[str, Any]:
    """What setup() needs beyond pyproject.toml."""
    if os.environ.get("OCNN_FUSED_BUILD_EXTENSION", "1") == "0":
        return {}
    require_tools()
    limit_jobs()
    from torch.utils.cpp_extension import BuildExtension

    return {"ext_modules": [extension()], "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=True)}}


setuptools.setup(**arguments())
