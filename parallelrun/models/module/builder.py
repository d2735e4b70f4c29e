"""From `model.source` to the module that the user's function builds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from parallelrun.base.errors import ConfigError, Problem, with_article
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.module.outputs import failed
from parallelrun.models.module.own_forward import OwnForward
from parallelrun.models.module.spec import named

KEY = "model.source"  # of messages
VOCAB_FIX = "take vocab as an argument of the function"


def load(source: str | None) -> Callable[..., nn.Module]:
    """The function that `file.py:function` or `package.module:function` names. Raises ConfigError."""
    path, name = named(source)
    try:
        module = _from_file(Path(path).expanduser()) if path.endswith(".py") else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        raise failed(f"model.source={source}", error) from error
    function: Callable[..., nn.Module] | None = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
        fix = " or ".join(
            f"model.source={path}:{close}" for close in get_close_matches(name, functions) or functions[:5]
        )
        message = f"model.source={source}: {path} has no function {name!r}"
        raise ConfigError(Problem(message, "model.source", fix))
    return function


def _from_file(path: Path) -> Any:
    """Import a file under a name of its own, with its folder on the path so that it can import its neighbours."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"parallelrun_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def make_module(config: Config, vocab: int) -> nn.Module:
    """Return what the user's function gives for `model.arguments` and the sizes that its signature names.

    Raises ConfigError with the user's lines.
    """
    make, model = load(config.model.source), config.model
    offered = {"vocab": vocab, "num_classes": vocab, "seq": model.seq, "hidden": model.hidden, "layers": model.layers,
               "heads": model.heads}  # fmt: skip
    try:
        parameters: Collection[str] = inspect.signature(make).parameters
    except (TypeError, ValueError):  # of some functions that are written in C
        parameters = ()
    arguments = {key: value for key, value in offered.items() if key in parameters} | dict(model.arguments)
    try:
        module = make(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and exit
        raise failed(f"{model.source} fails", error) from error
    if not isinstance(module, nn.Module):
        message = f"{model.source} gave {with_article(type(module).__name__)}, not an nn.Module"
        raise ConfigError(Problem(message, "model.source"))
    return module


def roles_of(config: Config, module: nn.Module) -> dict[str, str]:
    """Return the layer roles of the module: from patterns over module names to roles."""
    return config.model.roles


def title(config: Config) -> str:
    """Return the name of the module in messages."""
    return str(config.model.source)


def own_forward(config: Config, module: nn.Module) -> OwnForward | None:
    """Return None: blocks of a user's module are called one after the other."""
    return None
