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
import torch
from clean_venv import copy_sources, make_venv, run, torch_imported

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


#: What a build for something else leaves behind, and what the warning must then say.
FOREIGN_BUILDS = {
    "another torch": (
        {"torch": "1.99.0+cu118", "cuda": "11.8"},
        "was built for torch 1.99.0+cu118 with CUDA 11.8, found torch {torch}: rebuild it with `pip install",
    ),
    "another Python": ({"python": "2.7.18"}, "was built for Python 2.7.18, found Python {python}: rebuild it with"),
    "a library that is not there": (
        {"cuda": "99.0"},
        "was built for torch {version} with CUDA 99.0, found torch {torch} ({module}: ",
    ),
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
    found = _extension.torch_and_cuda(torch.__version__, torch.version.cuda).removeprefix("torch ")
    values = {"torch": found, "version": torch.__version__, "python": platform.python_version(), "module": module}
    assert expected.format(**values) in warning


def test_build_info() -> None:
    info = _extension.build_info
    assert info is not None
    assert info["version"] == ocnn_fused.__version__
    assert info["torch"] == torch.__version__
    assert info["python"] == platform.python_version()
    assert bool(info["cuda"]) == bool(info["architectures"])
    flags = f"{info['flags']} {info['nvcc_flags']}".split()
    assert "-fopenmp" in flags
    assert not {"-march=native", "-ffast-math", "--use_fast_math"} & set(flags)


def test_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ocnn_fused.__version__)
    try:
        assert importlib.metadata.version("ocnn-fused") == ocnn_fused.__version__
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is used without being installed")


#: What an environment has, how the build is started there, and how the one sentence that it ends in goes on.
LACKS = {
    "torch, pip": (["setuptools", "ninja"], "pip", "run `pip install torch` first, then `pip install --no-build"),
    "torch, setup.py": (["setuptools", "ninja"], "setup.py", "run `pip install torch` first, then `pip install --"),
    "ninja": (["setuptools", "torch"], "pip", "run `pip install ninja` first, then `pip install --no-build-isol"),
    "setuptools, pip": (["torch"], "pip", "is not installed: run `pip install 'setuptools>=77.0.3'` first"),
    "setuptools, setup.py": (["torch"], "setup.py", "is not installed: run `pip install 'setuptools>=77.0.3'`"),
    "torch, hidden": (["setuptools", "ninja"], "isolated", "an isolated build hides it: run `pip install --no-bu"),
}


@pytest.mark.slow
@pytest.mark.parametrize("lack", LACKS)
def test_a_build_that_cannot_be_ends_in_one_sentence(lack: str, copy: Path, tmp_path: Path) -> None:
    present, way, expected = LACKS[lack]
    # pip calls the folder of an isolated build so.
    python = make_venv(tmp_path / ("pip-build-env-x" if way == "isolated" else "bare"), *present)
    for package in ("torch", "setuptools"):
        for link in python.parents[1].glob(f"lib/python*/site-packages/{package}"):
            if package not in present:  # came with what requires it
                link.unlink()
    environment = {"PATH": str(tmp_path)}  # so that the machine's own ninja is not found
    if way == "pip":
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-build-isolation", "--no-deps", copy)
        done = run(*pip, **environment)
    else:
        done = run(python, "setup.py", "bdist_wheel", PWD=str(copy), **environment)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Traceback" not in output, output
    said = [line.strip() for line in output.splitlines() if line.strip().startswith("ocnn-fused is ")]
    assert len(said) == 1, output
    assert expected in said[0]


def test_an_old_python_is_told_so(copy: Path) -> None:
    code = "import sys, runpy; sys.version_info = (3, 9, 1); runpy.run_path('setup.py')"
    done = run(sys.executable, "-c", code, PWD=str(copy))
    assert done.stderr.startswith("ocnn-fused needs Python 3.10 or newer, this is ")


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
