"""Environments that contain what is named and nothing else, and copies of the sources to build in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process, with its output as text; started in PWD, without the settings of whoever runs the tests."""
    settings = ("OCNN_FUSED_", "CUDA_", "TORCH_CUDA_ARCH_LIST", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    return subprocess.run(
        [str(part) for part in command],
        env={**inherited, **environment},
        cwd=environment.get("PWD"),
        capture_output=True,
        text=True,
        timeout=600,
    )


def make_venv(folder: Path, *distributions: str) -> Path:
    """Python of a new venv with these distributions and what they require, linked from the environment in use."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in _with_requirements(distributions):
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}:
            if not (packages / part).exists() and part != "__pycache__":
                (packages / part).symlink_to(distribution.locate_file(part))
    return folder / "bin" / "python"


def _with_requirements(names: tuple[str, ...]) -> Iterator[str]:
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        yield name
        todo += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]


def copy_sources(target: Path) -> Path:
    """The sources as a clean clone has them, without anything that was built."""
    built = shutil.ignore_patterns("*.so", "build_info.json", "__pycache__", ".*_cache")
    for name in ("ocnn_fused", "csrc", "tools"):
        shutil.copytree(ROOT / name, target / name, ignore=built)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target)
    return target
