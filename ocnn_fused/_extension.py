"""Loads the compiled extension, or remembers why it could not be."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
_REBUILD = "rebuild it with `pip install --no-build-isolation .`"


def _read_build_info() -> dict[str, Any] | None:
    try:
        return json.loads(Path(__file__).with_name("build_info.json").read_text())
    except (OSError, ValueError):
        return None


#: What the extension was built with and for, as setup.py wrote it; None where nothing was built.
build_info: dict[str, Any] | None = _read_build_info()

#: One sentence that says why the compiled extension is not in use; None when it is.
unavailable_reason: str | None = None


def torch_and_cuda(version: str, cuda: str | None) -> str:
    """Both versions in words."""
    return f"torch {version} " + (f"with CUDA {cuda}" if cuda else "without CUDA")


def built_for() -> str:
    """The torch and the CUDA that the extension needs."""
    return torch_and_cuda(build_info["torch"], build_info["cuda"]) if build_info else "an unknown torch"


def _does_not_fit(why: str = "") -> str:
    found = torch_and_cuda(torch.__version__, torch.version.cuda)
    return f"the compiled extension was built for {built_for()}, found {found}{why}: {_REBUILD}"


def _not_found(elsewhere: Path | None = None) -> str:
    found = platform.python_version()
    if build_info and _release(build_info["python"]) != _release(found):
        return f"the compiled extension was built for Python {build_info['python']}, found Python {found}: {_REBUILD}"
    shadowed = _shadowed() or elsewhere
    if shadowed:
        return (
            f"the sources in {_HERE} were not compiled, and hide the package that is installed in "
            f"{shadowed}: start Python in another folder, or compile them with `python setup.py build_ext --inplace`"
        )
    return "the compiled extension is not built; run `pip install --no-build-isolation .` where torch is installed"


def _shadowed() -> Path | None:
    """Another copy of this package, further down in the search path, whose extension is built."""
    copies = [Path(entry or ".").resolve() / _HERE.name for entry in sys.path]
    return next((copy for copy in copies if copy != _HERE and any(copy.glob("_C.*"))), None)


def _release(version: str) -> list[str]:
    """Major and minor."""
    return version.split(".")[:2]


def _load() -> tuple[Any, str | None]:
    switch = os.environ.get("OCNN_FUSED_DISABLE_EXTENSION") or "0"
    if switch not in ("0", "1"):
        raise ValueError(f"OCNN_FUSED_DISABLE_EXTENSION must be 0 or 1, got {switch!r}")
    if switch == "1":
        return None, "the compiled extension is switched off by OCNN_FUSED_DISABLE_EXTENSION=1"
    # torch's C++ interface changes with every minor release: what links may still compute nonsense.
    if build_info and _release(build_info["torch"]) != _release(torch.__version__):
        return None, _does_not_fit()
    try:
        # An editable install offers its own module to every copy of the package, whatever their sources.
        found = importlib.util.find_spec(f"{__package__}._C")
        if found is not None and not Path(str(found.origin)).resolve().is_relative_to(_HERE):
            return None, _not_found(Path(str(found.origin)).parent)
        return importlib.import_module(f"{__package__}._C"), None
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._C":
            raise
        return None, _not_found()
    except ImportError as error:
        return None, _does_not_fit(f" ({error})")


module, unavailable_reason = _load()
