"""What :func:`ocnn_fused.tune` has found, kept on disk for later processes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch

from ...plan import Plan
from ..device import device_name
from .config import Config

_found: dict[str, Config] | None = None


def cache_path() -> Path:
    """Where results are kept; ``OCNN_FUSED_CACHE`` names another directory."""
    default = Path.home() / ".cache" / "ocnn_fused"
    return Path(os.environ.get("OCNN_FUSED_CACHE", default)) / "tuned.json"


def tuned_config(device: torch.device, precision: str, plans: Sequence[Plan]) -> Config | None:
    """What was found for these layers on this device, or None."""
    found = _load()
    return found.get(_key(device, precision, tuple(plans))) if found else None


def remember(device: torch.device, precision: str, plans: Sequence[Plan], config: Config) -> None:
    found = _load()
    found[_key(device, precision, tuple(plans))] = config
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({key: asdict(one) for key, one in found.items()}, indent=1))
    temporary.replace(path)  # never a half-written file


def _load() -> dict[str, Config]:
    """Read once per process. What cannot be read, or was written by a version with other settings, is left out."""
    global _found
    if _found is None:
        try:
            entries = dict(json.loads(cache_path().read_text()))
        except (OSError, TypeError, ValueError):
            entries = {}
        known = asdict(Config()).keys()
        _found = {key: Config(**one) for key, one in entries.items() if isinstance(one, dict) and one.keys() == known}
    return _found


@lru_cache(maxsize=256)
def _key(device: torch.device, precision: str, plans: tuple[Plan, ...]) -> str:
    """By the device's own name: relatives that share a model of their rates do not share measurements."""
    return f"{device_name(device)}|{precision}|" + ";".join(sorted({repr(plan) for plan in plans}))
