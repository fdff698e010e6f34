"""Whether the backend can run, without importing a kernel: what is missing is said in one sentence."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

from ..device import missing_gpu

#: The oldest triton whose interpreter, cooperative launch and `tl.dot` arguments the kernels rely on.
MINIMUM_TRITON = (3, 3)

#: This numpy makes no int of an array with one element, on which the interpreter of older versions of triton relies.
INTERPRETER_NUMPY, INTERPRETER_TRITON = (2, 5), (3, 7)

#: The oldest NVIDIA architecture on which Triton uses the tensor cores, and the AMD ones `make gpu-check` compiles for.
MINIMUM_CAPABILITY = (8, 0)
AMD_ARCHITECTURES = ("gfx90a", "gfx942")


def unavailable_reason(device: torch.device) -> str | None:
    """What is missing to serve ``device``, in one sentence, or None."""
    return triton_reason() or device_reason(device) or (driver_reason() if device.type == "cuda" else None)


def triton_reason() -> str | None:
    """What is wrong with the installed triton; a CUDA or ROCm build of torch brings one of its own."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; `pip install ocnn-fused[triton]`"
    try:
        import triton
        import triton.language
    except ImportError as error:
        return f"triton is installed but does not load: {error}"
    if _release(triton.__version__) < MINIMUM_TRITON:
        wanted = ".".join(map(str, MINIMUM_TRITON))
        return f"triton {triton.__version__} is too old, {wanted} or newer is needed; `pip install 'triton>={wanted}'`"
    return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


@lru_cache(maxsize=1)
def driver_reason() -> str | None:
    """What keeps Triton from talking to the driver: at first use it compiles a module for that. Tried once."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # whatever a compiler, a linker or a file system may raise
        first_line = (str(error).splitlines() or [""])[0]
        return (
            f"Triton cannot build its driver module, for which it needs a C compiler and libcuda "
            f"({type(error).__name__}: {first_line[:160]})"
        )
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; Triton decides when it decorates them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def interpreter_reason() -> str | None:
    """What keeps Triton's interpreter from running."""
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed; `pip install numpy`"
    import numpy
    import triton

    if _release(triton.__version__) < INTERPRETER_TRITON and _release(numpy.__version__) >= INTERPRETER_NUMPY:
        triton_wanted, numpy_wanted = (".".join(map(str, each)) for each in (INTERPRETER_TRITON, INTERPRETER_NUMPY))
        return (
            f"the interpreter of triton {triton.__version__} cannot use numpy {numpy.__version__}; "
            f"`pip install 'numpy<{numpy_wanted}'`, or triton {triton_wanted} or newer with a torch that it fits"
        )
    return None


def device_reason(device: torch.device) -> str | None:
    """What is wrong with the device."""
    if device.type == "cpu":
        if interpreted():
            return interpreter_reason()
        return "it serves GPUs; to try it on CPU tensors, start Python with TRITON_INTERPRET=1 (slow)"
    if device.type != "cuda":
        return f"it serves CUDA and ROCm devices, not {device.type}"
    missing = missing_gpu()
    if missing is not None:
        return missing
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if architecture in AMD_ARCHITECTURES:
            return None
        return f"{architecture} is not one of the AMD architectures it is compiled for ({', '.join(AMD_ARCHITECTURES)})"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MINIMUM_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} is sm_{major}{minor}, and Triton uses tensor cores only from sm_80 on"
    return None
