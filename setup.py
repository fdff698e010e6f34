"""Builds ``ocnn_fused._C`` from csrc/; everything that is not compiled is described in pyproject.toml.

The module knows addresses, not torch: it is compiled without torch and serves every version of it. What has to be
compiled is written into a build.ninja, so that a changed file or flag compiles only what it touches.

Environment:
    OCNN_FUSED_BUILD_EXTENSION=0  pure Python package, needs no compiler
    OCNN_FUSED_CUDA=0 or 1        without the CUDA backend, or fail if it cannot be built; by default it is built where
                                  nvcc is found, unless the torch in this environment is a build without CUDA
    CUDA_HOME=folder              the CUDA toolkit; by default that of the nvcc on PATH, else /usr/local/cuda
    TORCH_CUDA_ARCH_LIST=list     GPUs to build for, for instance "8.0;9.0+PTX"; by default those of ARCHITECTURES in
                                  tools/cuda_toolkit.py that nvcc knows, the newest also as PTX
    OCNN_FUSED_SANITIZE=list      debug build for ``-fsanitize=list``, see ``make sanitize``
    MAX_JOBS=n                    compilers at once; by default as many as there are cores
    CXX, CXXFLAGS, LDFLAGS        the C++ compiler, and what it is told beyond our own flags
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import cuda_toolkit  # noqa: E402
from cuda_toolkit import Toolkit  # noqa: E402

#: The stages are compiled for each of these; which of them runs is decided when the module is used.
TARGETS = ("baseline", "avx2", "avx512") if platform.machine() in ("x86_64", "AMD64") else ("baseline",)
STAGES = "*stages.cpp"

#: Fails to compile where C++20 is missing, in the compiler or in its library.
CPP20 = "#include <bit>\n#include <concepts>\n#include <span>\nstatic_assert(std::bit_width(4u) == 3);\n"

RULES = """
rule cxx
  description = compile $out
  command = $cxx $flags $more -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule nvcc
  description = compile $out
  command = $nvcc $nvcc_flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  description = link $out
  command = $linker -shared $in -o $out $link_flags
"""


def say(message: str) -> None:
    print(f"ocnn-fused: {message}", file=sys.stderr)


def switch(name: str, default: str) -> str:
    """The value of a variable that is 0 or 1, or the default."""
    value = os.environ.get(name) or default
    if value not in (default, "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, got {value!r}")
    return value


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler: how it is called, what it says it is, and its flags."""

    command: str
    name: str
    flags: list[str]
    link_flags: list[str]


def find_compiler() -> Compiler:
    """CXX or c++, if it compiles C++20; else the build ends in one sentence."""
    command = os.environ.get("CXX") or "c++"
    sanitizers = os.environ.get("OCNN_FUSED_SANITIZE", "")
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    if sanitizers:
        flags += [f"-fsanitize={sanitizers}", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    else:
        flags += ["-O3", "-g0"]
    try:
        name = run(command, "--version").stdout.partition("\n")[0]
        probe = run(command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-", text=CPP20)
    except OSError as error:
        raise SystemExit(
            f"ocnn-fused needs a C++ compiler, and {command!r} does not run ({error.strerror}): install one, set CXX, "
            "or set OCNN_FUSED_BUILD_EXTENSION=0 to run its plans through PyTorch alone"
        ) from None
    if probe.returncode:
        raise SystemExit(
            f"ocnn-fused needs a C++20 compiler, and {command!r} ({name}) is none: set CXX to another, such as GCC 11"
        )
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    link_flags = [f"-fsanitize={sanitizers}"] if sanitizers else []
    return Compiler(command, name, flags, link_flags + shlex.split(os.environ.get("LDFLAGS", "")))


def run(command: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*shlex.split(command), *arguments], input=text, capture_output=True, text=True)


def choose_toolkit() -> Toolkit | None:
    """The toolkit to build the CUDA backend with, or None to build without; says why, or ends the build."""
    wish = switch("OCNN_FUSED_CUDA", default="")
    if wish == "0":
        say("the CUDA backend is switched off by OCNN_FUSED_CUDA=0")
        return None
    try:
        if os.environ.get("OCNN_FUSED_SANITIZE"):
            raise cuda_toolkit.Unavailable("OCNN_FUSED_SANITIZE is for the CPU")
        if not wish and torch_without_cuda():
            raise cuda_toolkit.Unavailable("the torch installed here is built without it, and OCNN_FUSED_CUDA is not 1")
        toolkit = cuda_toolkit.find_toolkit()
    except cuda_toolkit.Unavailable as missing:
        if wish == "1":
            raise SystemExit(f"OCNN_FUSED_CUDA=1 asks for the CUDA backend, but {missing}") from None
        say(f"the CUDA backend is left out: {missing}")
        return None
    say(f"the CUDA backend is built with {toolkit} for {' '.join(cuda_toolkit.architectures(toolkit))}")
    return toolkit


def torch_without_cuda() -> bool:
    """Whether a torch is installed for which the CUDA backend is of no use.

    It is read, not imported: an isolated build hides the environment that the package is built for.
    """
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        version = Path(folder, "torch", "version.py")
        if version.is_file():
            return re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE) is None
    return False


def max_jobs() -> str | None:
    """MAX_JOBS, if it is set."""
    wanted = os.environ.get("MAX_JOBS") or None
    if wanted and not re.fullmatch(r"[1-9]\d*", wanted):
        raise SystemExit(f"MAX_JOBS must be a positive number, got {wanted!r}")
    return wanted


def nvcc_flags(toolkit: Toolkit, compiler: Compiler) -> list[str]:
    """What nvcc is told; it compiles for several architectures at once."""
    codes = [
        f"-gencode=arch=compute_{number},code={kind}_{number}"
        for kind, number in (name.split("_") for name in cuda_toolkit.architectures(toolkit))
    ]
    host = [f"-ccbin={shlex.split(compiler.command)[-1]}"] if os.environ.get("CXX") else []
    hidden = ["-Xcompiler=-fPIC", "-Xcompiler=-fvisibility=hidden"]
    return ["-std=c++20", "-O3", *hidden, f"--threads={max_jobs() or 0}", *host, *codes]


def find_ninja() -> str:
    """The ninja of the build requirements, which without activation of a venv is not on PATH, or the machine's."""
    found = shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    return found or end_without("ninja")


def python_includes() -> list[str]:
    """Flags for the one file that knows Python."""
    try:
        import pybind11
    except ModuleNotFoundError:
        end_without("pybind11")
    return [f"-isystem{folder}" for folder in (sysconfig.get_path("include"), pybind11.get_include())]


def end_without(tool: str) -> NoReturn:
    raise SystemExit(
        f"ocnn-fused is built with {tool}, which is not installed here: `pip install .` brings it along; without pip's "
        "isolation run `pip install 'setuptools>=77.0.3' ninja pybind11` first"
    )


class Build(build_ext):
    """Compiles with ninja, and writes build_info.json beside the module."""

    def run(self) -> None:
        compiler, toolkit = find_compiler(), choose_toolkit()
        module = Path(self.get_ext_fullpath(self.extensions[0].name)).resolve()
        folder = Path(self.build_temp).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        module.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(ninja_file(module, compiler, toolkit))
        command = [find_ninja(), "-C", str(folder), *(["-j", jobs] if (jobs := max_jobs()) else [])]
        if subprocess.run([*command, *(["--quiet"] if self.distribution.verbose < 1 else [])]).returncode:
            raise SystemExit("ocnn-fused was not compiled; the compiler's messages are above")
        (module.parent / "build_info.json").write_text(json.dumps(facts(compiler, toolkit), indent=2) + "\n")
        if self.inplace:  # for clangd, which looks for it there
            (ROOT / "build" / "compile_commands.json").write_text(run(shlex.join(command), "-t", "compdb").stdout)


def ninja_file(module: Path, compiler: Compiler, toolkit: Toolkit | None) -> str:
    """The text of build.ninja: how the module is compiled and linked."""
    variables = {"cxx": compiler.command, "flags": shlex.join(compiler.flags), "linker": compiler.command}
    link_flags = compiler.link_flags
    if toolkit:
        nvcc = shlex.quote(str(toolkit.nvcc))
        # CUDA's runtime becomes a part of the module, which then can be loaded where there is no library of CUDA.
        variables |= {"nvcc": nvcc, "linker": f"{nvcc} --cudart=static"}
        variables["nvcc_flags"] = shlex.join(nvcc_flags(toolkit, compiler))
        link_flags = [f"-Xcompiler={flag}" for flag in link_flags] + ["-Xlinker=--exclude-libs=ALL"]
    variables["link_flags"] = shlex.join(link_flags)
    lines = [*(f"{name} = {value}" for name, value in variables.items()), RULES]
    objects = []
    for rule, source, name, more in compiled_files(cuda=toolkit is not None):
        objects.append(f"{name}.o")
        lines += [f"build {name}.o: {rule} {escaped(source)}", f"  more = {shlex.join(more)}"]
    return "\n".join([*lines, f"build {escaped(module)}: link {' '.join(objects)}", ""])


def compiled_files(cuda: bool) -> Iterator[tuple[str, Path, str, list[str]]]:
    """Rule, source, name of the object, and further flags of everything that is compiled."""
    csrc = ROOT / "csrc"
    sources = sorted([*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp"), *(csrc.glob("cuda/*.cu") if cuda else ())])
    # What takes longest comes first, so that no core is idle in the end.
    for source in sorted(sources, key=lambda path: (path.suffix != ".cu", not path.match(STAGES))):
        name = source.relative_to(csrc).with_suffix("").as_posix()
        if source.suffix == ".cu":
            yield "nvcc", source, name, []
        elif source.match(STAGES):
            for target in TARGETS:
                yield "cxx", source, f"{name}.{target}", [f"-DOCNN_FUSED_TARGET={target}"]
        elif source.name == "bindings.cpp":
            # -O1: nothing here takes time but compiling it.
            yield "cxx", source, name, ["-O1", *python_includes()] + ["-DOCNN_FUSED_WITH_CUDA"] * cuda
        else:
            yield "cxx", source, name, []


def escaped(path: Path) -> str:
    """As ninja wants it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def facts(compiler: Compiler, toolkit: Toolkit | None) -> dict[str, Any]:
    """What build_info.json says."""
    return {
        "version": version(),
        "python": platform.python_version(),
        "compiler": compiler.name,
        "flags": " ".join(compiler.flags),
        "cuda": toolkit.version if toolkit else None,
        "architectures": cuda_toolkit.architectures(toolkit) if toolkit else [],
        "nvcc_flags": " ".join(nvcc_flags(toolkit, compiler)) if toolkit else "",
    }


def version() -> str:
    """The package's version, from the file that pyproject.toml reads as well."""
    names: dict[str, str] = {}
    exec((ROOT / "ocnn_fused" / "_version.py").read_text(), names)
    return names["__version__"]


is_compiled = switch("OCNN_FUSED_BUILD_EXTENSION", default="1") == "1"
modules = [setuptools.Extension("ocnn_fused._C", [])] if is_compiled else []
setuptools.setup(ext_modules=modules, cmdclass={"build_ext": Build})
