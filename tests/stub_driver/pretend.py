"""A GPU that is not there: Triton compiles and launches for it, and the stub of libcuda writes down what arrives.

To be imported before the package: Triton decides then whether it compiles or interprets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
if __name__ == "pretend":  # in a process of its own; tests only build the stub
    os.environ["TRITON_INTERPRET"] = "0"
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parents[1] / "benchmarks")]

COMPILER = shutil.which("gcc") or shutil.which("cc")
MULTIPROCESSORS = 16


def build(folder: Path) -> None:
    """The stub, as libcuda.so.1 in a folder."""
    import triton

    assert COMPILER is not None
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run([COMPILER, *flags, str(HERE / "libcuda.c"), "-o", str(library)], check=True)
    (folder / "libcuda.so").symlink_to(library)  # what older versions of Triton link with


def gpu(folder: Path, target: str) -> ctypes.CDLL:
    """Makes torch and Triton believe in a GPU, for instance sm_90, whose driver is the stub in that folder."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

    import torch

    from ocnn_fused.backends.triton.launch import Call

    # Under its name, so that whoever opens libcuda.so.1 later gets this one.
    stub = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    stub.stub_launches.restype = ctypes.c_char_p
    stub.stub_declare.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    capability = divmod(int(target.removeprefix("sm_")), 10)
    little_shared = capability in ((8, 6), (8, 9), (12, 0))
    shared = (99 if little_shared else 163 if capability == (8, 0) else 227) << 10
    stub.stub_set_device(*capability, MULTIPROCESSORS, shared, 48 if little_shared else 64)
    properties = SimpleNamespace(
        name="a GPU that is not there",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=MULTIPROCESSORS,
        shared_memory_per_multiprocessor=shared + 1024,
    )
    # What Triton's driver and the package ask torch for.
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # of torch built with CUDA, which would look for a GPU
    Call.capability = property(lambda self: capability, lambda self, value: None)  # type: ignore[assignment,method-assign]
    return stub
