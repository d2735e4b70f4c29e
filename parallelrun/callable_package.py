"""Packages that can be called: `parallelrun.plan` holds the planner, and `parallelrun.plan("tp=2")` makes a plan."""

from __future__ import annotations

from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A module of this class stands for the function of its name in `parallelrun.api`.

    `sys.modules[__name__].__class__ = CallablePackage` makes it one (Python's reference, "Customizing module attribute
    access").
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function()(*args, **options)

    @property
    def __signature__(self) -> Signature:
        return signature(self._function())

    def _function(self) -> Any:
        return getattr(import_module("parallelrun.api"), self.__name__.rpartition(".")[2])
