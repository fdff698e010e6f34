"""Builds the sdist and, from it, the wheel, checks what they contain, and tries the one wheel with several torches.

    python tools/dist.py --out dist torch==2.10.0 torch==2.13.0

Needs setuptools; pip's isolated build brings what the wheel needs. A torch is a requirement, which is installed into an
environment of its own, or the Python of an environment that has one. Which files belong into the sdist is asked of git.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def pip(python: Path, *command: object) -> None:
    """Our pip, working for another Python."""
    run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet", *command)


def run(*command: object, **options: object) -> str:
    """The output of a command; ends with all of it if the command fails."""
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        raise SystemExit(
            f"{done.stdout}\n{' '.join(str(part) for part in command)[:200]} failed with exit code {done.returncode}"
        )
    return done.stdout


def tracked_files() -> set[str]:
    """What git knows, or would if it were added."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def build_sdist(python: Path, out: Path) -> Path:
    """From a copy of the tracked files, so that nothing that lies around gets in."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in tracked_files():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        build = f"from setuptools import build_meta; build_meta.build_sdist({str(out.resolve())!r})"
        run(python, "-c", build, cwd=folder, env={**os.environ, "OCNN_FUSED_BUILD_EXTENSION": "0"})
    (sdist,) = out.glob("*.tar.gz")
    return sdist


def build_wheel(python: Path, sdist: Path, out: Path, *options: str) -> Path:
    """As a user does who has the sdist only."""
    pip(python, "wheel", *options, "--no-deps", "--wheel-dir", out, sdist)
    (wheel,) = out.glob("*.whl")
    return wheel


def sdist_problems(sdist: Path) -> list[str]:
    """Files that are missing or should not be there."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    generated = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    expected = {name for name in tracked_files() if name == ".clang-format" or not name.startswith(".")}
    return _differences(sdist.name, names - generated, expected)


def wheel_problems(wheel: Path) -> list[str]:
    """The same for the wheel: the package, its extension, the facts of the build, and pip's own folder."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in names if re.match(r"ocnn_fused-[^/]+\.dist-info/", name)}
    module = {name for name in names if re.fullmatch(r"ocnn_fused/_C\.[^/]+\.(so|pyd)", name)}
    expected = {name for name in tracked_files() if re.fullmatch(r"ocnn_fused/.+\.py|ocnn_fused/py\.typed", name)}
    problems = [] if len(module) == 1 else [f"{wheel.name} contains {len(module)} extension modules"]
    return problems + _differences(wheel.name, names - info - module, expected | {"ocnn_fused/build_info.json"})


def _differences(archive: str, names: set[str], expected: set[str]) -> list[str]:
    lacking = [f"{archive} lacks {name}" for name in sorted(expected - names)]
    return lacking + [f"{archive} should not contain {name}" for name in sorted(names - expected)]


def python_with(torch: str, folder: Path) -> Path:
    """The Python that is named, or that of a new environment with the torch that is required."""
    if Path(torch).is_file():
        return Path(torch).absolute()
    run(sys.executable, "-m", "venv", folder)
    python = folder.absolute() / "bin" / "python"
    pip(python, "install", torch)
    return python


def check_with(python: Path, wheel: Path) -> str:
    """What the wheel's package says about itself and its results where there is a torch; nothing is installed there."""
    with tempfile.TemporaryDirectory() as folder:
        pip(python, "install", "--no-deps", "--no-index", "--target", folder, wheel)
        return run(python, "-m", "ocnn_fused.check", "--device", "cpu", "--backend", "cpu", cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torches", nargs="*", help="what the wheel is tried with")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    options = parser.parse_args()
    sdist = build_sdist(Path(sys.executable), options.out)
    wheel = build_wheel(Path(sys.executable), sdist, options.out)
    with tempfile.TemporaryDirectory() as folder:
        for number, torch in enumerate(options.torches):
            print(check_with(python_with(torch, Path(folder, str(number))), wheel))
    for path in (sdist, wheel):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    raise SystemExit("\n".join(sdist_problems(sdist) + wheel_problems(wheel)) or 0)


if __name__ == "__main__":
    main()
