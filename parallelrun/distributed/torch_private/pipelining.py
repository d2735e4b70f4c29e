"""torch's pipeline stages and schedules, without the tracing that is in the same package.

torch.distributed.pipelining imports torch.export, to cut models into stages, and the front end of torch.compile, for
one class: that takes a third of a second. Here it imports them when something else is asked of it than its stages and
schedules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch.distributed

_PACKAGE, _FRONT_END = "torch.distributed.pipelining", "torch._dynamo"


class _IfCompiled(type):
    """The instances of a class of this type are those of the front end's class of the same name, once it is loaded."""

    def __instancecheck__(cls, value: object) -> bool:
        front_end = sys.modules.get(_FRONT_END)
        return front_end is not None and isinstance(value, getattr(front_end, cls.__name__))


def _package_without_tracing() -> ModuleType:
    """Return the package, which runs its own `__init__` when an attribute is missing."""
    spec = find_spec(_PACKAGE)
    assert spec is not None and spec.loader is not None, "torch.distributed is a package with files"
    package, loader = module_from_spec(spec), spec.loader

    def run_and_get(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # what modules are looked through for
            raise AttributeError(name)
        del package.__getattr__
        loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = run_and_get  # type: ignore[method-assign]
    return package


@contextmanager
def _without_tracing() -> Iterator[None]:
    """Prepare the package, unless it is loaded, and hide the front end from what is imported of it, likewise."""
    if _PACKAGE not in sys.modules:
        torch.distributed.pipelining = sys.modules[_PACKAGE] = _package_without_tracing()
    stand_in = ModuleType(_FRONT_END)
    stand_in.OptimizedModule = _IfCompiled("OptimizedModule", (), {})  # type: ignore[attr-defined]
    is_hidden = sys.modules.setdefault(_FRONT_END, stand_in) is stand_in
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[_FRONT_END]


with _without_tracing():
    import torch.distributed.pipelining.schedules  # `from` would first ask the package
    from torch.distributed.pipelining.stage import PipelineStage

__all__ = ["PipelineStage"]
