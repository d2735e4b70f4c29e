"""Empty modules instead of packages that a peer imports and never uses here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from collections.abc import Collection
from types import ModuleType
from typing import Any


class Empty(ModuleType):
    """A package of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An entry of `sys.meta_path`: packages of these names, and whatever is imported from them, are empty."""

    def __init__(self, names: Collection[str]):
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self._names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...
