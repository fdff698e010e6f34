"""Finds nvcc for setup.py, and what it compiles for; needs the standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Compute capabilities that a build is for, as far as nvcc knows them, unless TORCH_CUDA_ARCH_LIST says otherwise.
ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

#: Names that torch knows for some of them.
NAMED = {
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;12.0+PTX",
}

#: Where a toolkit lies if nothing says otherwise.
USUAL_HOME = Path("/usr/local/cuda")


class Unavailable(Exception):
    """CUDA code cannot be compiled here; the text says what is missing."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that compiles C++20: its compiler, its release, its headers, and what it can compile for."""

    nvcc: Path
    version: str
    include: Path
    known: frozenset[str]

    def __str__(self) -> str:
        return f"CUDA {self.version} ({self.nvcc})"


def find_toolkit(environment: Mapping[str, str] = os.environ) -> Toolkit:
    """The toolkit of CUDA_HOME or CUDA_PATH, else of the nvcc on PATH, else the one in the usual place."""
    nvcc = _find_nvcc(environment)
    release = re.search(r"release (\d+\.\d+)", _run(nvcc, "--version"))
    if release is None:
        raise Unavailable(f"{nvcc} --version names no release")
    # Fails without cuda_runtime.h, with a host compiler that nvcc does not support, and without C++20 (before CUDA 12).
    headers = _run(nvcc, "-std=c++20", "-E", "-x", "cu", os.devnull)
    include = re.search(r'^# \d+ "(.+)/cuda_runtime\.h"', headers, re.MULTILINE)
    if include is None:
        raise Unavailable(f"{nvcc} of CUDA {release[1]} does not compile C++20: it includes no cuda_runtime.h")
    known = re.findall(r"compute_(\w+)", _run(nvcc, "--list-gpu-arch"))
    return Toolkit(nvcc, release[1], Path(include[1]).resolve(), frozenset(known))


def _find_nvcc(environment: Mapping[str, str]) -> Path:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := environment.get(variable):
            nvcc = Path(home) / "bin" / "nvcc"
            if not nvcc.is_file():
                raise Unavailable(f"{variable}={home} contains no bin/nvcc")
            return nvcc
    found = shutil.which("nvcc", path=environment.get("PATH")) or shutil.which("nvcc", path=str(USUAL_HOME / "bin"))
    if found is None:
        raise Unavailable("no CUDA toolkit was found: CUDA_HOME is not set, and nvcc is not on PATH")
    return Path(found)


def _run(nvcc: Path, *options: str) -> str:
    try:
        done = subprocess.run([str(nvcc), *options], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{nvcc} does not run ({error})") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise Unavailable(f"{nvcc} {' '.join(options)} fails ({said})")
    return done.stdout


def architectures(toolkit: Toolkit, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Machine code (sm_90), and behind it PTX (compute_90), of TORCH_CUDA_ARCH_LIST or the default list."""
    wanted = environment.get("TORCH_CUDA_ARCH_LIST")
    if not wanted:
        wanted = ";".join(each for each in ARCHITECTURES if each.replace(".", "") in toolkit.known) + "+PTX"
    wanted = ";".join(NAMED.get(name, name) for name in wanted.replace(" ", ";").split(";") if name)
    found: set[tuple[str, int, str]] = set()
    for name in wanted.split(";"):
        parts = re.fullmatch(r"(\d+)\.(\d)([a-z]?)(\+PTX)?", name)
        if parts is None or f"{parts[1]}{parts[2]}" not in toolkit.known:
            known = " ".join(f"{number[:-1]}.{number[-1]}" for number in sorted(toolkit.known, key=int))
            why = "" if parts is None else f", and CUDA {toolkit.version} knows {known}"
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must be a list like '8.0;9.0+PTX'{why}; got {name!r}")
        number = int(parts[1] + parts[2])
        found |= {(kind, number, parts[3]) for kind in (("sm", "compute") if parts[4] else ("sm",))}
    order = sorted(found, key=lambda each: (each[0] == "compute", *each[1:]))
    return [f"{kind}_{number}{letter}" for kind, number, letter in order]
