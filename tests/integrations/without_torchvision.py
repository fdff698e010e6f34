"""Stands in for torchvision where it has no build for the torch in use: timm imports it, its networks do without."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Empty(type):
    """Of classes that have every attribute, each another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Hollow(ModuleType):
    """A module in which every name is an empty class."""

    __path__ = ()
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in() -> None:
    """Only where torchvision is missing."""
    if not find_spec("torchvision"):
        sys.meta_path.append(_Finder())
