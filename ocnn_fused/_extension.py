"""Loads the compiled extension, or remembers why it could not be."""

from __future__ import annotations

import importlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

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


def _not_found() -> str:
    found = platform.python_version()
    if build_info and _release(build_info["python"]) != _release(found):
        return f"the compiled extension was built for Python {build_info['python']}, found Python {found}: {_REBUILD}"
    return "the compiled extension is not built; run `pip install --no-build-isolation .` where torch is installed"


def _release(version: str) -> list[str]:
    """Major and minor."""
    return version.split(".")[:2]


def _load() -> tuple[Any, str | None]:
    if os.environ.get("OCNN_FUSED_DISABLE_EXTENSION") == "1":
        return None, "the compiled extension is switched off by OCNN_FUSED_DISABLE_EXTENSION=1"
    # torch's C++ interface changes with every minor release: what links may still compute nonsense.
    if build_info and _release(build_info["torch"]) != _release(torch.__version__):
        return None, _does_not_fit()
    try:
        return importlib.import_module(f"{__package__}._C"), None
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._C":
            raise
        return None, _not_found()
    except ImportError as error:
        return None, _does_not_fit(f" ({error})")


module, unavailable_reason = _load()
