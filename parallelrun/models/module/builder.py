"""From `model.source` to the module that the user's function builds."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from parallelrun.base import user_functions
from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.config.schema.run_schema import Config

KEY = "model.source"  # of messages
VOCAB_FIX = "take vocab as an argument of the function"


def make_module(config: Config, vocab: int) -> nn.Module:
    """Return what the user's function gives for `model.arguments` and the sizes that its signature names.

    Raises ConfigError with the user's lines.
    """
    model = config.model
    offered = {"vocab": vocab, "num_classes": vocab, "seq": model.seq, "hidden": model.hidden, "layers": model.layers,
               "heads": model.heads}  # fmt: skip
    if not vocab:  # the data do not say it
        offered = {name: value for name, value in offered.items() if name not in ("vocab", "num_classes")}
    module = user_functions.call(KEY, model.source, offered, model.arguments)
    if not isinstance(module, nn.Module):
        message = f"{model.source} gave {with_article(type(module).__name__)}, not an nn.Module"
        raise ConfigError(Problem(message, KEY))
    if lazy := next((name for name, parameter in module.named_parameters() if is_lazy(parameter)), ""):
        message = f"{lazy} of {model.source}, a lazy module, has no shape before a first call"
        raise ConfigError(Problem(message, KEY, "call the module once in the function, or give it its input's size"))
    return module


def roles_of(config: Config, module: nn.Module) -> dict[str, str]:
    """Return the layer roles of the module: from patterns over module names to roles."""
    return config.model.roles


def title(config: Config) -> str:
    """Return the name of the module in messages."""
    return str(config.model.source)


def cut(config: Config, module: nn.Module) -> tuple[list[str], list[str]]:
    """Return patterns of the modules before the blocks, and of the blocks."""
    return config.model.before, config.model.blocks
