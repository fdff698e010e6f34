"""Builds the extension with its CUDA backend and checks what came out; needs nvcc, but neither a GPU nor torch's CUDA.

    python tools/cuda_build.py --out build/cuda

The machine code in the module must be that of the architectures asked for and use no stack, and the module must need no
library of CUDA to be loaded. Nothing is executed on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]


def build(out: Path) -> tuple[Path, str]:
    """The folder of the package with its extension, and how long the build took."""
    library = out / "lib"
    folders = ("--build-base", str(out), "--build-lib", str(library))
    start = perf_counter()
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", *folders],
        cwd=ROOT,
        env={**os.environ, "OCNN_FUSED_CUDA": "1"},
        check=True,
    )
    seconds, used = perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = len(os.sched_getaffinity(0))
    return library, f"{seconds:.0f} s on {processors} cores, {used.ru_utime + used.ru_stime:.0f} s of processor time"


def embedded(module: Path) -> set[str]:
    """Architectures of the machine code (sm_90) and of the PTX (compute_90) in the module."""
    listing = dump(module, "--list-elf", "--list-ptx")
    found = re.findall(r"\.sm_(\w+)\.(cubin|ptx)$", listing, re.MULTILINE)
    return {f"{'sm' if kind == 'cubin' else 'compute'}_{number}" for number, kind in found}


def stacks(module: Path) -> dict[str, list[int]]:
    """Bytes of stack that each kernel of the module takes, once per architecture."""
    found: dict[str, list[int]] = {}
    for name, stack in re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", dump(module, "--dump-resource-usage")):
        found.setdefault(name, []).append(int(stack))
    return found


def dump(module: Path, *options: str) -> str:
    return command(cuobjdump(), *options, module)


def command(*words: str | Path) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def cuobjdump() -> str:
    """The one on PATH, or the one that comes with Triton."""
    triton = find_spec("triton")
    folders = [os.environ.get("PATH", os.defpath)]
    if triton and triton.origin:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    found = shutil.which("cuobjdump", path=os.pathsep.join(folders))
    if found is None:
        raise SystemExit("The build cannot be checked: cuobjdump is neither on PATH nor in the triton package")
    return found


def check(library: Path) -> list[str]:
    """Import the package and print what it has; returns what is wrong."""
    sys.path.insert(0, str(library.resolve()))
    import torch

    from ocnn_fused import _extension, fused_orth_loss, reference

    if _extension.module is None or _extension.build_info is None:
        return [f"the extension does not load: {_extension.unavailable_reason}"]
    problems = [] if _extension.module.has_cuda else ["the module has no CUDA backend"]
    module = Path(_extension.module.__file__)
    wanted, found = set(_extension.build_info["architectures"]), embedded(module)
    print("architectures:", *_extension.build_info["architectures"])
    if wanted != found:
        problems.append(f"the module contains code for {sorted(found)}, but was built for {sorted(wanted)}")
    of_kernels, machine_codes = stacks(module), sum(name.startswith("sm_") for name in found)
    print(f"{len(of_kernels)} kernels, largest stack {max(map(max, of_kernels.values()), default=0)} bytes")
    if not of_kernels:
        problems.append("the module contains no kernel")
    for name, sizes in of_kernels.items():
        if len(sizes) != machine_codes:
            problems.append(f"{name} is compiled for {len(sizes)} of {machine_codes} architectures")
        if any(sizes):
            problems.append(f"{name} uses up to {max(sizes)} bytes of stack")
    libraries = re.findall(r"NEEDED.*\[(libcu\S+)\]", command("readelf", "--dynamic", module))
    problems += [f"{name} is needed to load the module" for name in libraries]
    weight = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    if not torch.allclose(fused_orth_loss(weight), reference.orth_loss(weight)):
        problems.append("the loss on the CPU is wrong")
    print(f"{module.name}: {module.stat().st_size / 1e6:.1f} MB")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for objects and, in lib/, the package")
    out = parser.parse_args().out.resolve()
    try:
        library, duration = build(out)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"The build failed with exit code {error.returncode}") from None
    problems = check(library)
    print(f"Built in {duration}")
    raise SystemExit("; ".join(problems) or 0)


if __name__ == "__main__":
    main()
