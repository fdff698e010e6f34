"""Loads the compiled extension, or remembers why it could not be."""

from __future__ import annotations

import importlib
import os
from typing import Any

#: One sentence that says why the compiled extension is not in use; None when it is.
unavailable_reason: str | None = None


def _load() -> tuple[Any, str | None]:
    if os.environ.get("OCNN_FUSED_DISABLE_EXTENSION") == "1":
        return None, "the compiled extension is switched off by OCNN_FUSED_DISABLE_EXTENSION=1"
    try:
        return importlib.import_module(f"{__package__}._C"), None
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}._C":
            raise
        return (
            None,
            "the compiled extension is not built; run `pip install --no-build-isolation .` where torch is installed",
        )
    except ImportError as error:
        import torch

        return None, (
            f"the compiled extension does not load with torch {torch.__version__} ({error}); "
            "rebuild it with `pip install --no-build-isolation .`"
        )


module, unavailable_reason = _load()
