"""Finds the CUDA toolkit that setup.py compiles with, and what it compiles for; needs the standard library only.

python tools/cuda_toolkit.py      prints the toolkit, or ends in one sentence that says what is missing
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

Version = tuple[int, int]

#: Compute capabilities that a build is for unless TORCH_CUDA_ARCH_LIST says otherwise, and the first CUDA to know them.
ARCHITECTURES: dict[str, Version] = {
    "7.5": (10, 0),
    "8.0": (11, 0),
    "8.6": (11, 1),
    "8.9": (11, 8),
    "9.0": (11, 8),
    "10.0": (12, 8),
    "12.0": (12, 8),
}

#: The first whose nvcc compiles C++20.
OLDEST: Version = (12, 0)

#: Where a toolkit lies if nothing says otherwise.
USUAL_HOME = Path("/usr/local/cuda")

#: Included by torch's CUDA headers; toolkits come without them, and the pip packages of torch's libraries with them.
LIBRARY_HEADERS = ("cublas_v2.h", "cusolverDn.h", "cusparse.h")


class Unavailable(Exception):
    """CUDA code cannot be compiled here; the text says what is missing."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: the folder with bin/nvcc, and its release."""

    home: Path
    version: Version

    def __str__(self) -> str:
        return f"CUDA {dotted(self.version)} in {self.home}"

    @property
    def include_folders(self) -> list[Path]:
        return [folder for folder in (self.home / "include", *self.home.glob("targets/*/include")) if folder.is_dir()]


def dotted(version: Version) -> str:
    """12.8 for (12, 8)."""
    return ".".join(map(str, version))


def parse(version: str) -> Version:
    """(12, 8) for 12.8 or 12.8.93."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def find_toolkit(environment: Mapping[str, str] = os.environ) -> Toolkit:
    """The toolkit of CUDA_HOME or CUDA_PATH, else of the nvcc on PATH, else the one in the usual place."""
    nvcc = _find_nvcc(environment)
    release = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    if release is None:
        raise Unavailable(f"{nvcc} --version names no release")
    for home in _homes(nvcc):
        toolkit = Toolkit(home, parse(release[1]))
        if (home / "bin" / "nvcc").is_file() and any(_with_header("cuda_runtime.h", toolkit.include_folders)):
            return toolkit
    raise Unavailable(f"{nvcc} has no cuda_runtime.h beside it; set CUDA_HOME to the folder of a whole toolkit")


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


def _homes(nvcc: Path) -> Iterator[Path]:
    """Folders that may be nvcc's toolkit. A wrapper or a link may lie anywhere, so nvcc itself is asked first."""
    top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    if top is not None:
        yield Path(top[1].strip()).resolve()
    yield nvcc.resolve().parents[1]
    yield nvcc.absolute().parents[1]


def _output(*command: object) -> str:
    try:
        done = subprocess.run(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} does not run ({error})") from error
    return done.stdout


def _with_header(header: str, folders: Iterable[Path]) -> Iterator[Path]:
    return (folder for folder in folders if (folder / header).is_file())


def check_fits(toolkit: Toolkit, torch_version: str, torch_cuda: str) -> str | None:
    """None if the toolkit is of torch's CUDA, a warning if another minor version; raises if another major."""
    wanted = parse(torch_cuda)
    versions = f"torch {torch_version} was built with CUDA {dotted(wanted)} and the toolkit is {toolkit}"
    if toolkit.version[0] != wanted[0]:
        raise Unavailable(f"{versions}: their major versions must agree, so set CUDA_HOME to a toolkit that fits")
    if toolkit.version < OLDEST:
        raise Unavailable(f"the toolkit is {toolkit}, and C++20 needs CUDA {dotted(OLDEST)} or newer")
    if toolkit.version != wanted:
        return f"{versions}: this usually works, but the same minor version is safer"
    return None


def default_architectures(version: Version) -> str:
    """All of ARCHITECTURES that this CUDA knows, as TORCH_CUDA_ARCH_LIST; the newest also as PTX, for later GPUs."""
    known = [name for name, first in ARCHITECTURES.items() if first <= version]
    return ";".join(known) + "+PTX"


def library_include_folders(toolkit: Toolkit, packages: Iterable[Path] | None = None) -> list[Path]:
    """Folders of the nvidia pip packages with the library headers that the toolkit lacks; raises if nobody has one."""
    candidates = list(nvidia_packages() if packages is None else packages)
    folders: list[Path] = []
    for header in LIBRARY_HEADERS:
        if any(_with_header(header, [*toolkit.include_folders, *folders])):
            continue
        folder = next(_with_header(header, (package / "include" for package in candidates)), None)
        if folder is None:
            raise Unavailable(f"{header} is neither in {toolkit.home} nor in an nvidia package beside torch")
        folders.append(folder)
    return folders


def nvidia_packages() -> list[Path]:
    """What pip installed into the nvidia namespace: nvidia/cu13 of CUDA 13, nvidia/cublas and others before."""
    namespace = find_spec("nvidia")
    roots = namespace.submodule_search_locations if namespace else None
    return sorted(path for root in roots or () for path in Path(root).iterdir())


if __name__ == "__main__":
    try:
        print(find_toolkit())
    except Unavailable as missing:
        raise SystemExit(f"CUDA code cannot be compiled here: {missing}") from None
