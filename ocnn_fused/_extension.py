"""Loads the compiled extension and shows it torch's threads, or remembers why it could not be loaded."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

#: The first torch that shares work among its threads for others.
OLDEST_TORCH = (2, 10)

_HERE = Path(__file__).resolve().parent
_REBUILD = "rebuild it with `pip install .`"


def _require_torch(version: str) -> None:
    if tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"ocnn_fused needs torch {oldest} or newer, found torch {version}")


def _read_build_info() -> dict[str, Any] | None:
    try:
        return json.loads(Path(__file__).with_name("build_info.json").read_text())
    except (OSError, ValueError):
        return None


#: What the extension was built with and for, as setup.py wrote it; None where nothing was built.
build_info: dict[str, Any] | None = _read_build_info()

#: One sentence that says why the compiled extension is not in use; None when it is.
unavailable_reason: str | None = None


def _not_found(elsewhere: Path | None = None) -> str:
    found = platform.python_version()
    if build_info and build_info["python"].split(".")[:2] != found.split(".")[:2]:
        return f"the compiled extension was built for Python {build_info['python']}, found Python {found}: {_REBUILD}"
    shadowed = _shadowed() or elsewhere
    if shadowed:
        return (
            f"the sources in {_HERE} were not compiled, and hide the package that is installed in "
            f"{shadowed}: start Python in another folder, or compile them with `python setup.py build_ext --inplace`"
        )
    return "the compiled extension is not built; `pip install .` in the sources builds it"


def _shadowed() -> Path | None:
    """Another copy of this package, further down in the search path, whose extension is built."""
    copies = [Path(entry or ".").resolve() / _HERE.name for entry in sys.path]
    return next((copy for copy in copies if copy != _HERE and any(copy.glob("_C.*"))), None)


def _load() -> tuple[Any, str | None]:
    switch = os.environ.get("OCNN_FUSED_DISABLE_EXTENSION") or "0"
    if switch not in ("0", "1"):
        raise ValueError(f"OCNN_FUSED_DISABLE_EXTENSION must be 0 or 1, got {switch!r}")
    if switch == "1":
        return None, "the compiled extension is switched off by OCNN_FUSED_DISABLE_EXTENSION=1"
    try:
        # An editable install offers its own module to every copy of the package, whatever their sources.
        found = importlib.util.find_spec(f"{__package__}._C")
        if found is not None and not Path(str(found.origin)).resolve().is_relative_to(_HERE):
            return None, _not_found(Path(str(found.origin)).parent)
        loaded = importlib.import_module(f"{__package__}._C")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._C":
            raise
        return None, _not_found()
    except ImportError as error:
        return None, f"the compiled extension cannot be loaded ({error}): {_REBUILD}"
    if not hasattr(loaded, "use_torch"):
        return None, f"the compiled extension is that of an older version: {_REBUILD}"
    loaded.use_torch(*_torch_functions(), torch.backends.cpu.get_cpu_capability())
    return loaded, None


def _torch_functions() -> tuple[int, int]:
    """Addresses of the C functions with which the extension uses torch's threads."""
    library = ctypes.CDLL("libtorch_cpu.so")  # loaded with torch, so that its name is enough
    functions = library.torch_parallel_for, library.torch_get_num_threads
    parallel_for, num_threads = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return parallel_for, num_threads


_require_torch(torch.__version__)
module, unavailable_reason = _load()
