"""The definition of `model=module`. The spec is read off the user's module itself, which needs torch."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import ModelSpec


def named(source: str | None) -> tuple[str, str]:
    """(file or module, function) of `model.source`. Raises ConfigError, before torch is imported."""
    path, colon, name = (source or "").rpartition(":")
    if not colon:
        message = f"model.source={source}: it must name a function that builds an nn.Module"
        raise ConfigError(Problem(message, "model.source", "model.source=./net.py:build"))
    if path.endswith(".py") and not Path(path).expanduser().is_file():
        message = f"model.source={source}: there is no file {Path(path).expanduser().absolute()}"
        raise ConfigError(Problem(message, "model.source"))
    if not path.endswith(".py") and not _has_package(path.partition(".")[0]):
        message = f"model.source={source}: No module named {path.partition('.')[0]!r}"
        raise ConfigError(Problem(message, "model.source", "model.source=./net.py:build"))
    return path, name


def _has_package(name: str) -> bool:
    with suppress(ImportError, ValueError):
        return find_spec(name) is not None
    return False


class UserModuleDefinition(ModelDefinition):
    """See the package's docstring for the contract with the user's module."""

    own_keys = frozenset({
        "source", "roles", "blocks", "arguments", "vocab", "seq", "hidden", "layers", "heads", "label_smoothing",
        "norm_samples", "lora",
    })  # fmt: skip

    def make(self, config: Config, vocab: int) -> ModelSpec:
        named(config.model.source)
        from parallelrun.models.module.inspection import read_spec

        return read_spec(config, vocab)


MODEL = UserModuleDefinition()
