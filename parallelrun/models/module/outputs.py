"""What a user's module returns: its logits, in whatever form, or its exception."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError, Problem, with_article


def logits_of(out: Any) -> Any:
    """Return the logits in `out`: itself, its attribute or entry `logits`, or the first tensor of a tuple.

    Without any of them, `out` is returned, and the caller says what is missing.
    """
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(out, (tuple, list)):
        return next((part for part in out if isinstance(part, Tensor)), out)
    return out


def return_logits(module: nn.Module) -> None:
    """Make the module return its logits only. Modules that return a tensor do so already."""
    module.register_forward_hook(lambda module, inputs, out: logits_of(out))


def undefined(message: str, fix: str = "", where: str = "model.blocks") -> ConfigError:
    return ConfigError(Problem(message, where, fix, kind="undefined"))


def call(name: str, block: nn.Module, x: Any) -> Tensor:
    """block(x). Raises ConfigError naming the block."""
    try:
        out = block(x)
    except ConfigError:  # of the user's own loss
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        shape = f" on an input of shape {tuple(x.shape)}" if isinstance(x, Tensor) else ""
        message = f"block {name} fails{shape}: {user_code.reason(error)}"
        where = " <- ".join(reversed(user_code.frames(error))) or "model.source"
        fix = "model.image=SIZE" if isinstance(x, Tensor) and x.dim() == 4 else ""
        raise ConfigError(Problem(message, where, fix)) from error
    if not isinstance(out, Tensor):
        message = f"block {name} gives {with_article(type(out).__name__)}; a block maps one tensor to one tensor"
        raise undefined(message)
    return out
