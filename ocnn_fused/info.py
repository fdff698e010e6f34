"""``python -m ocnn_fused.info``: versions, backends and why one is missing, devices, environment; for bug reports."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata

import torch

from . import _extension
from ._version import __version__
from .backends import MODULES

#: Environment variables that change what is built, found or run.
PREFIXES = ("OCNN_FUSED_", "TRITON_INTERPRET", "TORCH_CUDA_ARCH_LIST", "CUDA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def devices() -> list[torch.device]:
    """The CPU and every GPU that torch sees; one that it does not see, so that the reason can be told."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *(gpus or [torch.device("cuda")])]


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return (
            f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
        )
    if not torch.cuda.is_available():
        return "cuda (torch sees no GPU)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"


def _as_text(fact: object) -> object:
    text = " ".join(fact) if isinstance(fact, list) else fact
    return "none" if text in (None, "") else text


def lines() -> Iterator[str]:
    """The report, line by line."""
    cuda = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield f"ocnn_fused {__version__}, torch {torch.__version__} {cuda}, triton {_version_of('triton')}"
    yield f"Python {platform.python_version()} on {platform.platform()}"
    yield f"extension: {_extension.unavailable_reason or 'loaded'}"
    if _extension.build_info:
        yield from (f"  {name}: {_as_text(value)}" for name, value in _extension.build_info.items())
    for device in devices():
        yield _device_name(device)
        for name, backend in MODULES.items():
            yield f"  {name:<7} {backend.unavailable_reason(device) or 'available'}"
    flags = sorted(name for name in os.environ if name.startswith(PREFIXES))
    yield "environment: " + (", ".join(f"{name}={os.environ[name]}" for name in flags) or "no flags set")


if __name__ == "__main__":
    print("\n".join(lines()))
