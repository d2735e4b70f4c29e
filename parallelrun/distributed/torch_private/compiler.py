"""Settings of torch.compile. Importing its front end takes half a second, which others are spared."""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any, TypeVar

import torch

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def import_compiler() -> None:
    """Import the front end of torch.compile, which DTensor and torch.utils.checkpoint import at their first call."""
    import_module("torch._dynamo")


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
