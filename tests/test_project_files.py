"""Files that repeat what another file says: they must agree."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ocnn_fused import OrthRegularizer, __version__
from ocnn_fused.regularizer.settings import Settings

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="an sdist comes without some of these files")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def ci_jobs() -> dict[str, str]:
    """The text of each job of the workflow ci."""
    parts = re.split(r"^  (\w+):\n", read(".github/workflows/ci.yml").partition("\njobs:\n")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_version_is_in_the_changelog_and_the_citation() -> None:
    assert re.search(rf"^version: {re.escape(__version__)}$", read("CITATION.cff"), re.MULTILINE)
    sections = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)
    assert sections[:2] == ["Unreleased", __version__]


def test_workflow_checks_what_the_local_command_checks() -> None:
    (targets,) = re.findall(r"^make (.+)$", read(".ci/run"), re.MULTILINE)
    assert re.findall(r"run: make (\S+)", ci_jobs()["check"]) == targets.split()
    assert targets.split()[-1] == "test"


def test_oldest_supported_versions_are_tested() -> None:
    oldest_torch = re.search(r'"torch>=([\d.]+)"', read("pyproject.toml"))
    oldest_python = re.search(r'requires-python = ">=([\d.]+)"', read("pyproject.toml"))
    assert oldest_torch
    assert oldest_python
    versions = ci_jobs()["versions"]
    assert re.search(
        rf'python: "{re.escape(oldest_python[1])}", torch: torch=={re.escape(oldest_torch[1])}\.', versions
    )
    assert f"torch {oldest_torch[1]} or newer" in read("README.md")
    assert f"Python {oldest_python[1]} or newer" in read("README.md")


def test_claimed_versions_are_tested() -> None:
    """Every Python of the classifiers, and every pair that the README names, is in the workflow."""
    jobs = ci_jobs()
    tested = re.findall(r'python: "([\d.]+)", torch: torch(?:==(\d+\.\d+))?', jobs["versions"])
    (default,) = re.findall(r"^TORCH +\?= torch==(\d+\.\d+)", read("Makefile"), re.MULTILINE)
    tested += [(python, default) for python in re.findall(r'python-version: "([\d.]+)"', jobs["check"])]
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert sorted(claimed) == sorted({python for python, _ in tested})
    (sentence,) = re.findall(r"The suite runs on (.+?)\. Compiling", " ".join(read("README.md").split()))
    for python, torch in tested:
        assert re.search(rf"{torch or 'newest torch'} with [^,]*\b{python}\b", sentence.replace("Python ", "")), python


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_hooks_run_what_make_lint_runs() -> None:
    dry_run = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = [line for line in dry_run.splitlines() if re.match(r"\S+/python -m (ruff|mypy)|\S+/clang-format", line)]
    hooks = read(".pre-commit-config.yaml")
    *whole, clang_format = re.findall(r"entry: (.+)", hooks)
    assert commands[:-1] == whole
    command, _, files = commands[-1].partition(" --Werror ")
    assert clang_format == f"{command} --Werror"  # of the files in the commit, if make lint would look at them
    (pattern,) = re.findall(r"files: (.+)", hooks)
    native = [path.relative_to(ROOT).as_posix() for top in ("csrc", "tests") for path in (ROOT / top).rglob("*.*")]
    assert sorted(files.split()) == sorted(name for name in native if re.match(pattern, name))


def test_one_default_lambda() -> None:
    """The constructor, the callback, every example, the README and the guide."""
    default = str(inspect.signature(OrthRegularizer).parameters["weight"].default)
    assert str(Settings().weight) == default
    assert f"weight: Weight = {default}," in read("ocnn_fused/integrations/lightning.py")
    assert f"OrthRegularizer(model, weight={default}, " in read("README.md")
    assert f"The default of `OrthRegularizer` is {default}." in " ".join(read("docs/training.md").split())
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    found = [value for text in texts for value in re.findall(r'"--weights?", type=float,.* default=\[?([\d.]+)', text)]
    assert set(found) == {default}
