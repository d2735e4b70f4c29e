"""The definition of `model=module`. The spec is read off the user's module itself, which needs torch."""

from __future__ import annotations

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.user_functions import named
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import ModelSpec


class UserModuleDefinition(ModelDefinition):
    """See the package's docstring for the contract with the user's module."""

    own_keys = frozenset({
        "source", "loss", "roles", "before", "blocks", "arguments", "vocab", "seq", "hidden", "layers", "heads",
        "label_smoothing", "norm_samples", "lora", "image",
    })  # fmt: skip

    def make(self, config: Config, vocab: int) -> ModelSpec:
        named("model.source", config.model.source)
        if config.model.loss is not None:
            named("model.loss", config.model.loss)
            if axes := [axis for axis in ("pp", "tp", "cp", "ep") if (getattr(config, axis) or 1) > 1]:
                message = f"model.loss runs the whole module on complete samples, and {axes[0]} splits it"
                raise ConfigError(Problem(message, "model.loss", f"{axes[0]}=1", kind="undefined"))
        from parallelrun.models.module.inspection import read_spec

        return read_spec(config, vocab)


MODEL = UserModuleDefinition()
