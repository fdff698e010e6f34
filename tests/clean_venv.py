"""Environments that contain what is named and nothing else, and copies of the sources to build in them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


#: Executes one piece of code after the other, each in a fork, and prints how it ended.
FORKS = """
import json, os, signal, sys
import torch
for line in sys.stdin:
    code, environment, folder = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(f"{folder}/{stream.fileno()}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(environment["PWD"])
    exec(code, {"__name__": "__main__"})
    break
"""


def without_settings() -> dict[str, str]:
    """The environment without the settings of whoever runs the tests."""
    settings = ("OCNN_FUSED_", "CUDA_", "TORCH_CUDA_ARCH_LIST", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(settings)}


@contextmanager
def torch_imported(python: Path | str) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs code as ``run(python, "-c", code, ...)`` does, but imports torch once for all of it: that takes longest."""
    command, pipe = [str(python), "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, env=without_settings(), text=True, stdin=pipe, stdout=pipe) as forks:

        def run_code(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
            environment = {**without_settings(), "PWD": os.getcwd(), **environment}
            with TemporaryDirectory() as folder:
                print(json.dumps([code, environment, folder]), file=forks.stdin, flush=True)
                assert forks.stdout
                ended = int(forks.stdout.readline())
                output, errors = (Path(folder, number).read_text() for number in "12")
            return subprocess.CompletedProcess(code, ended, output, errors)

        yield run_code


def run(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished process, with its output as text; started in PWD, without the settings of whoever runs the tests."""
    return subprocess.run(
        [str(part) for part in command],
        env={**without_settings(), **environment},
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
                (packages / part).symlink_to(str(distribution.locate_file(part)))
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


def copy_sources(target: Path, without: Collection[str] = ()) -> Path:
    """The sources as a clean clone has them, without anything that was built."""
    built = shutil.ignore_patterns("*.so", "build_info.json", "__pycache__", ".*_cache")
    for name in {"ocnn_fused", "csrc", "tools"}.difference(without):
        shutil.copytree(ROOT / name, target / name, ignore=built)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, target)
    return target
