"""Settings and events of torch.compile. Importing its front end takes half a second, which others are spared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from inspect import unwrap
from typing import Any, TypeVar

import torch

_FRONT_END = "torch._dynamo"
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def before_compiling(callback: Callable[[object], None]) -> None:
    """Call `callback` before torch.compile traces anything, whenever its front end is imported.

    torch.distributed.pipelining imports it, too, and then mostly nothing is compiled. What keeps a function out of
    graphs costs at each call.
    """
    if _FRONT_END in sys.modules:
        _register(callback)
    else:
        sys.meta_path.insert(0, _OnImport(callback))


class _OnImport(MetaPathFinder):
    """Finds no module; registers `callback` at the first import of one inside the front end."""

    def __init__(self, callback: Callable[[object], None]):
        self._callback = callback

    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith(f"{_FRONT_END}.") and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register(self._callback)


def _register(callback: Callable[[object], None]) -> None:
    from torch._dynamo.callback import callback_handler

    if callback not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(callback)


def import_compiler() -> None:
    """Import the front end of torch.compile, which DTensor and torch.utils.checkpoint import at their first call."""
    import_module(_FRONT_END)


def uncompiled(optimizer: type[OptimizerT]) -> type[OptimizerT]:
    """Return an optimizer class that equals `optimizer`, but does not tell torch.compile to leave its methods alone:
    torch would import the front end to do so."""
    plain: dict[str, Any] = {"add_param_group": unwrap(optimizer.add_param_group)}
    plain["step"] = torch.no_grad()(unwrap(optimizer.step))  # torch's decorator sets this, too
    return type(optimizer.__name__, (optimizer,), plain)


def keep_compiled_buffers() -> None:
    """Let compiled backward passes run more than once, for zero bubble; by default they reuse their buffers."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False
