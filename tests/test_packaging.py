"""The package as it is installed: without its extension, without torch, and what the wheel contains."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from clean_venv import ROOT, copy_sources, make_venv, run, torch_imported

import ocnn_fused
from ocnn_fused import _extension

#: Fails unless the package computes the reference's loss and gradient; prints its warnings.
FALLBACK = """
import sys, warnings
{block}

def loss_and_gradient(function, weight, stride):
    loss = function(weight, stride)
    return loss, *torch.autograd.grad(loss, weight)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import ocnn_fused

    torch.manual_seed(0)
    for shape, stride in (((8, 4, 3, 3), 1), ((6, 12, 4, 4), 2), ((8, 1, 3), 1), ((5, 7), 1)):
        weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        fused = loss_and_gradient(ocnn_fused.fused_orth_loss, weight, stride)
        reference = loss_and_gradient(ocnn_fused.reference.orth_loss, weight, stride)
        for ours, theirs in zip(fused, reference):
            # torch.testing.assert_close would take longer to import what it needs than all the rest takes.
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-11)
for warning in caught:
    if "compiled backend" in str(warning.message):
        print("WARNING", warning.message)
"""

#: How the extension is kept from loading, and what the warning must then mention.
BLOCKS = {
    "switched off": ("import os; os.environ['OCNN_FUSED_DISABLE_EXTENSION'] = '1'", "OCNN_FUSED_DISABLE_EXTENSION"),
    "not built": (
        """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "ocnn_fused._C":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
""",
        "not built",
    ),
    "does not load": (
        """
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "ocnn_fused._C":
            raise ImportError("undefined symbol: planted_by_the_test")

sys.meta_path.insert(0, Broken())
""",
        "undefined symbol: planted_by_the_test",
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_sources(tmp_path / "copy")


@pytest.fixture(scope="module")
def run_code() -> Iterator[Callable[..., CompletedProcess[str]]]:
    with torch_imported(sys.executable) as run_code:
        yield run_code


@pytest.mark.parametrize("block", BLOCKS)
def test_works_without_the_extension_and_says_so_once(
    block: str, run_code: Callable[..., CompletedProcess[str]]
) -> None:
    code, reason = BLOCKS[block]
    done = run_code(FALLBACK.format(block=code), PWD=str(Path(ocnn_fused.__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1, done.stdout
    assert "slower" in warnings[0]
    assert reason in warnings[0]


#: Imports the package and uses it, in line 7 of this file.
USER = """
import sys, warnings
sys.path.insert(0, ".")  # as `python -c` and a prompt do
import torch
import ocnn_fused
warnings.simplefilter("always")
ocnn_fused.fused_orth_loss(torch.ones(4, 4, 3, 3))
"""


def test_sources_that_shadow_the_installed_package(copy: Path, tmp_path: Path) -> None:
    """The warning says what is shadowed and how to get out of it, and points at the line that calls."""
    elsewhere = tmp_path / "site-packages"
    shutil.copytree(Path(ocnn_fused.__file__).parent, elsewhere / "ocnn_fused")
    script = tmp_path / "user.py"
    script.write_text(USER)
    done = run(sys.executable, script, PWD=str(copy), PYTHONPATH=str(elsewhere))
    assert done.returncode == 0, done.stderr
    assert f"{script}:7: RuntimeWarning: No compiled backend for cpu" in done.stderr
    assert f"the sources in {copy / 'ocnn_fused'} were not compiled, and hide the package" in done.stderr
    assert f"installed in {elsewhere / 'ocnn_fused'}: start Python in another folder, or compile" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OCNN_FUSED_DISABLE_EXTENSION", "yes", "OCNN_FUSED_DISABLE_EXTENSION must be 0 or 1, got 'yes'"),
        ("OCNN_FUSED_BACKEND", "foo", "OCNN_FUSED_BACKEND must be one of 'cpu', 'triton', 'cuda', 'torch', got 'foo'"),
    ],
)
def test_variables_with_bad_values(
    variable: str, value: str, message: str, run_code: Callable[..., CompletedProcess[str]]
) -> None:
    folder = str(Path(ocnn_fused.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {folder!r}){USER}"
    done = run_code(code, PWD=folder, **{variable: value})
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == f"ValueError: {message}"


#: What is wrong with a build, and what the warning must then say.
FOREIGN_BUILDS = {
    "another Python": (
        {"python": "2.7.18"},
        "was built for Python 2.7.18, found Python {python}: rebuild it",
    ),
    "no library": ({}, "the compiled extension cannot be loaded ({module}: "),
}


@pytest.mark.parametrize("build", FOREIGN_BUILDS)
def test_built_for_something_else(build: str, run_code: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    facts, expected = FOREIGN_BUILDS[build]
    package = tmp_path / "ocnn_fused"
    shutil.copytree(Path(ocnn_fused.__file__).parent, package, ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    assert _extension.build_info is not None
    (package / "build_info.json").write_text(json.dumps({**_extension.build_info, **facts}))
    module = package / Path(_extension.module.__file__).name
    module.write_bytes(b"not a library")
    # Another Python does not see the module at all, because of its name.
    block = BLOCKS["not built"][0] if build == "another Python" else ""
    done = run_code(FALLBACK.format(block=block), PWD=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (warning,) = (line for line in done.stdout.splitlines() if line.startswith("WARNING"))
    assert expected.format(python=platform.python_version(), module=module) in warning


@pytest.mark.parametrize(("version", "fits"), [("2.9.1+cu128", False), ("2.10.0", True), ("3.0.0a0+git1", True)])
def test_oldest_torch(version: str, fits: bool, run_code: Callable[..., CompletedProcess[str]]) -> None:
    """Whatever is imported first of the package."""
    folder = str(Path(ocnn_fused.__file__).parents[1])
    code = f"import sys, torch; sys.path.insert(0, {folder!r}); torch.__version__ = {version!r}; import ocnn_fused"
    done = run_code(code, PWD=folder)
    assert (done.returncode == 0) == fits, done.stderr
    if not fits:
        expected = "ImportError: ocnn_fused needs torch 2.10 or newer, found torch 2.9.1+cu128"
        assert done.stderr.splitlines()[-1] == expected


def test_build_info() -> None:
    info = _extension.build_info
    assert info is not None
    assert info["version"] == ocnn_fused.__version__
    assert info["python"] == platform.python_version()
    assert bool(info["cuda"]) == bool(info["architectures"])
    flags = f"{info['flags']} {info['nvcc_flags']}".split()
    assert "-std=c++20" in flags
    assert not {"-march=native", "-ffast-math", "--use_fast_math"} & set(flags)


@pytest.mark.skipif(_extension.module is None, reason="needs the compiled extension")
def test_module_knows_no_torch() -> None:
    """Neither symbols of torch nor its libraries, nor CUDA's, so that one module serves every torch."""
    module = _extension.module.__file__
    symbols = run("nm", "--dynamic", "--undefined-only", "--demangle", module).stdout
    assert "PyObject_" in symbols
    assert not re.search(r"\b(at|c10|torch|caffe2)::|\bTH|\bcu(da|blas)", symbols)
    libraries = re.findall(r"NEEDED.*\[(.+)\]", run("readelf", "--dynamic", module).stdout)
    assert libraries
    usual = r"lib(stdc\+\+|gcc_s|m|c|pthread|dl|rt|asan|ubsan)\.|ld-"
    assert not [name for name in libraries if not re.match(usual, name)]


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="needs the sources")
def test_sources_include_no_torch() -> None:
    texts = {path: path.read_text() for path in (ROOT / "csrc").rglob("*.*")}
    assert texts
    assert not [path for path, text in texts.items() if re.search(r"#include [<\"](torch|ATen|c10)/", text)]


def test_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ocnn_fused.__version__)
    try:
        assert importlib.metadata.version("ocnn-fused") == ocnn_fused.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is used without being installed")


@pytest.mark.slow
@pytest.mark.parametrize(("present", "missing"), [(("pybind11",), "ninja"), (("ninja",), "pybind11")])
def test_a_build_that_cannot_be_ends_in_one_sentence(
    present: tuple[str, ...], missing: str, copy: Path, tmp_path: Path
) -> None:
    python = make_venv(tmp_path / "bare", "setuptools", *present)
    path = tmp_path / "bin"  # so that the machine's own ninja is not found
    path.mkdir()
    for tool in ("c++", *present):
        (path / tool).symlink_to(str(shutil.which(tool) or tool))
    done = run(python, "setup.py", "build_ext", PWD=str(copy), PATH=str(path), OCNN_FUSED_CUDA="0")
    assert done.returncode != 0
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ocnn-fused is built with {missing}, which is not installed here: `pip install .` brings")


@pytest.mark.slow
def test_pure_wheel_contains_the_package_and_nothing_else(copy: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, copy)
    done = run(*pip, OCNN_FUSED_BUILD_EXTENSION="0")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"ocnn_fused-{ocnn_fused.__version__}-py3-none-any.whl"

    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.startswith(f"ocnn_fused-{ocnn_fused.__version__}.dist-info/")}
    package = {path.relative_to(copy).as_posix() for path in (copy / "ocnn_fused").rglob("*") if path.suffix == ".py"}
    assert names - metadata == package | {"ocnn_fused/py.typed"}
    assert any(name.endswith("LICENSE") for name in metadata)
