"""The sdist and the wheel built from it: what they contain, and that they work where home and caches are read-only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dist
import pytest
from clean_venv import ROOT, make_venv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git is asked what belongs into an sdist"),
]

#: A folder that nobody can create, not even root.
NOWHERE = "/dev/null/nowhere"
CACHES = ("HOME", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "OCNN_FUSED_CACHE")


@dataclass(frozen=True)
class Files:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module", autouse=True)
def unwritable_caches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CACHES:
            patch.setenv(name, NOWHERE)
        patch.setenv("PIP_NO_CACHE_DIR", "1")  # pip's own, which it cannot do without in a path like that
        patch.setenv("OCNN_FUSED_CUDA", "0")  # takes minutes; `make cuda-build` builds it
        yield


@pytest.fixture(scope="module")
def files(unwritable_caches: None, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Built where there is no torch."""
    folder = tmp_path_factory.mktemp("dist")
    builder = make_venv(folder / "builder", "setuptools", "ninja", "pybind11")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", "-O0")  # that what is built is fast is not the matter here
        sdist = dist.build_sdist(builder, folder / "files")
        wheel = dist.build_wheel(builder, sdist, folder / "files", "--no-build-isolation", "--no-index")
    return Files(sdist, wheel)


def test_sdist_contains_the_sources_and_nothing_else(files: Files) -> None:
    assert dist.sdist_problems(files.sdist) == []


def test_wheel_contains_the_package_and_nothing_else(files: Files) -> None:
    assert dist.wheel_problems(files.wheel) == []


def test_wheel_computes_in_another_environment(files: Files, tmp_path: Path) -> None:
    said = dist.check_with(make_venv(tmp_path / "user", "torch"), files.wheel)
    assert "extension: loaded" in said
    assert said.splitlines()[-1] == "all is well"
