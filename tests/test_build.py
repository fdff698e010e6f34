"""What setup.py decides, says and refuses, and what it compiles; toolkits are scripts that answer as nvcc does."""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import cuda_toolkit
import pytest
import setuptools
from clean_venv import ROOT, copy_sources, run
from cuda_toolkit import Unavailable

#: What nvcc of CUDA 12.8 answers, as far as it is asked.
NVCC = """#!/bin/sh
case "$*" in
    --version) echo "Cuda compilation tools, release {version}, V{version}.61" ;;
    --list-gpu-arch) printf 'compute_%s\\n' {known} ;;
    *-E*) echo '# 1 "{home}/include/cuda_runtime.h" 1' ;;
    *) exit 1 ;;
esac
"""

CUDA_12_8 = "50 75 80 86 89 90 100 120"


def make_toolkit(home: Path, version: str = "12.8", known: str = CUDA_12_8) -> Path:
    """A folder that looks like a toolkit."""
    write_nvcc(home / "bin", NVCC.format(version=version, home=home, known=known))
    return home


def write_nvcc(folder: Path, script: str) -> Path:
    folder.mkdir(parents=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(script)
    nvcc.chmod(0o755)
    return nvcc


# ----------------------------------------------------------------------------------------------------------------------
# The toolkit and its architectures
# ----------------------------------------------------------------------------------------------------------------------


def test_toolkit_named_by_the_environment(tmp_path: Path) -> None:
    first, second = (make_toolkit(tmp_path / version, version) for version in ("12.4", "13.1"))
    assert cuda_toolkit.find_toolkit({"CUDA_HOME": str(first)}).nvcc == first / "bin" / "nvcc"
    assert cuda_toolkit.find_toolkit({"CUDA_PATH": str(second)}).version == "13.1"
    both = {"CUDA_HOME": str(first), "CUDA_PATH": str(second), "PATH": f"{second}/bin"}
    assert cuda_toolkit.find_toolkit(both).version == "12.4"


def test_nvcc_on_path_or_in_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one on PATH may be a wrapper that lies elsewhere than the toolkit."""
    monkeypatch.setattr(cuda_toolkit, "USUAL_HOME", tmp_path / "cuda")
    with pytest.raises(Unavailable, match="CUDA_HOME is not set, and nvcc is not on PATH"):
        cuda_toolkit.find_toolkit({"PATH": str(tmp_path)})
    make_toolkit(tmp_path / "cuda", "12.6")
    assert cuda_toolkit.find_toolkit({"PATH": str(tmp_path)}).version == "12.6"
    home = make_toolkit(tmp_path / "cuda-13.0", "13.0")
    wrapper = write_nvcc(tmp_path / "bin", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    found = cuda_toolkit.find_toolkit({"PATH": str(wrapper.parent)})
    assert (found.nvcc, found.version, found.include) == (wrapper, "13.0", home / "include")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho hello\n", "names no release"),
        ("#!/nowhere/sh\n", "does not run"),
        ("#!/bin/sh\n[ $1 = --version ] && echo release 11.8 || { echo 'error: no c++20' >&2; exit 1; }\n", "no c++20"),
        ("#!/bin/sh\necho release 12.8\n", "includes no cuda_runtime.h"),
    ],
)
def test_useless_nvcc(script: str, message: str, tmp_path: Path) -> None:
    write_nvcc(tmp_path / "bin", script)
    with pytest.raises(Unavailable, match=message.replace("+", r"\+")):
        cuda_toolkit.find_toolkit({"CUDA_HOME": str(tmp_path)})
    with pytest.raises(Unavailable, match=f"CUDA_HOME={tmp_path}/bin contains no bin/nvcc"):
        cuda_toolkit.find_toolkit({"CUDA_HOME": str(tmp_path / "bin")})


@pytest.mark.parametrize(
    ("wanted", "known", "expected"),
    [
        ("", CUDA_12_8, "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 compute_120"),
        ("", "50 75 80 86 89 90", "sm_75 sm_80 sm_86 sm_89 sm_90 compute_90"),
        ("9.0+PTX 8.6", CUDA_12_8, "sm_86 sm_90 compute_90"),
        ("9.0a;10.0", CUDA_12_8, "sm_90a sm_100"),
        ("Ampere;Hopper", CUDA_12_8, "sm_80 sm_86 sm_90 compute_86 compute_90"),
    ],
)
def test_architectures(wanted: str, known: str, expected: str, tmp_path: Path) -> None:
    toolkit = cuda_toolkit.find_toolkit({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda", known=known))})
    assert cuda_toolkit.architectures(toolkit, {"TORCH_CUDA_ARCH_LIST": wanted}) == expected.split()


@pytest.mark.parametrize(("wanted", "message"), [("8.0;Riva", "; got 'Riva'"), ("3.5", "CUDA 12.8 knows 5.0 7.5 8.0")])
def test_bad_architectures(wanted: str, message: str, tmp_path: Path) -> None:
    toolkit = cuda_toolkit.find_toolkit({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda"))})
    with pytest.raises(SystemExit, match=rf"TORCH_CUDA_ARCH_LIST must be a list like '8.0;9.0\+PTX'.*{message}"):
        cuda_toolkit.architectures(toolkit, {"TORCH_CUDA_ARCH_LIST": wanted})


# ----------------------------------------------------------------------------------------------------------------------
# What setup.py decides
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, without setting up anything, and without the settings of whoever runs the tests."""
    for name in ("OCNN_FUSED_CUDA", "OCNN_FUSED_SANITIZE", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CXX", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_py", module)
    spec.loader.exec_module(module)
    return module


#: torch/version.py of the environment, whether there is a toolkit, OCNN_FUSED_CUDA, and what is said.
WORLDS = {
    "no torch": (None, True, "", "is built with CUDA 12.8 "),
    "torch with CUDA": ("cuda: Optional[str] = '13.0'", True, "", "is built with CUDA 12.8 "),
    "torch without CUDA": (
        "cuda: Optional[str] = None",
        True,
        "",
        "is left out: the torch installed here ",
    ),
    "torch without CUDA, forced": ("cuda: Optional[str] = None", True, "1", "is built with CUDA 12.8 "),
    "no toolkit": (None, False, "", "is left out: CUDA_HOME="),
    "no toolkit, forced": (None, False, "1", "OCNN_FUSED_CUDA=1 asks for the CUDA backend, but CUDA_HOME="),
    "switched off": (None, True, "0", "is switched off by OCNN_FUSED_CUDA=0"),
    "neither on nor off": (None, True, "yes", "OCNN_FUSED_CUDA must be 0 or 1, got 'yes'"),
}


@pytest.mark.parametrize("world", WORLDS)
def test_when_cuda_is_built(
    world: str,
    setup_py: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch, has_toolkit, wish, expected = WORLDS[world]
    if torch:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.99.0'\n{torch}\nhip: Optional[str] = None\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda") if has_toolkit else tmp_path))
    monkeypatch.setenv("OCNN_FUSED_CUDA", wish)
    if expected.startswith("OCNN_FUSED_CUDA"):
        with pytest.raises(SystemExit, match=expected):
            setup_py.choose_toolkit()
    else:
        assert bool(setup_py.choose_toolkit()) == ("is built" in expected)
        assert capsys.readouterr().err.startswith(f"ocnn-fused: the CUDA backend {expected}")


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("/nowhere/c++", r"needs a C\+\+ compiler, and '/nowhere/c\+\+' does not run \(No such"),
        ("c++ -std=c++98 -Dspan=", r"needs a C\+\+20 compiler, and 'c\+\+ -std=c\+\+98 -Dspan=' \(.+\) is none"),
    ],
)
def test_useless_compiler(compiler: str, message: str, setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=message):
        setup_py.find_compiler()


def test_jobs(setup_py: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolkit = cuda_toolkit.find_toolkit({"CUDA_HOME": str(make_toolkit(tmp_path / "cuda"))})
    assert "--threads=0" in setup_py.nvcc_flags(toolkit, setup_py.find_compiler())
    monkeypatch.setenv("MAX_JOBS", "3")
    assert "--threads=3" in setup_py.nvcc_flags(toolkit, setup_py.find_compiler())
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(SystemExit, match="MAX_JOBS must be a positive number, got 'many'"):
        setup_py.max_jobs()


# ----------------------------------------------------------------------------------------------------------------------
# What is compiled
# ----------------------------------------------------------------------------------------------------------------------

#: Stands in for csrc/: what is compiled is not the matter here.
SOURCES = {
    "plan.h": "#pragma once\n",
    "bindings.cpp": '#include "plan.h"\n',
    "cpu/sharing.cpp": "",
    "cpu/stages.cpp": '#include "stages.h"\n',
    "cpu/stages.h": '#include "../plan.h"\n',
}

#: Notes what it compiles, then compiles it.
COMPILER = """#!/bin/sh
for word in "$@"; do case "$word" in *.o) [ "$1" = -shared ] || echo "$word" >> {log} ;; esac; done
exec c++ "$@"
"""


def test_what_changes_is_compiled_again(setup_py: ModuleType, tmp_path: Path) -> None:
    sources = copy_sources(tmp_path / "sources", without=("csrc",))
    for name, text in SOURCES.items():
        (sources / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / "csrc" / name).write_text(text)
    log, compiler = tmp_path / "compiled", tmp_path / "c++"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)

    def compiled(**environment: str) -> list[str]:
        log.write_text("")
        command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
        done = run(*command, PWD=str(sources), CXX=str(compiler), OCNN_FUSED_CUDA="0", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(log.read_text().split())

    stages = [f"cpu/stages.{target}.o" for target in sorted(setup_py.TARGETS)]
    assert compiled() == ["bindings.o", "cpu/sharing.o", *stages]
    (module,) = (sources / "ocnn_fused").glob("_C.*")
    facts = json.loads((sources / "ocnn_fused" / "build_info.json").read_text())
    assert facts["cuda"] is None
    assert compiled() == []
    for changed, expected in {"cpu/sharing.cpp": ["cpu/sharing.o"], "cpu/stages.h": stages}.items():
        (sources / "csrc" / changed).write_text(SOURCES[changed] + "// changed\n")
        assert compiled() == expected
    assert compiled(CXXFLAGS="-DOTHER") == ["bindings.o", "cpu/sharing.o", *stages]
    module.unlink()
    assert compiled(CXXFLAGS="-DOTHER") == []
    assert module.exists()
    (sources / "csrc" / "cpu" / "sharing.cpp").write_text("wrong\n")
    done = run(sys.executable, "setup.py", "build_ext", "--inplace", PWD=str(sources), OCNN_FUSED_CUDA="0")
    assert done.stderr.splitlines()[-1] == "ocnn-fused was not compiled; the compiler's messages are above"
