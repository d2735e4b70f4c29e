"""The definition of `model=module`. The spec is read off the user's module itself, which needs torch."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.definitions import ModelDefinition
from parallelrun.model_spec import ModelSpec


class UserModuleDefinition(ModelDefinition):
    """See the package's docstring for the contract with the user's module."""

    def make(self, config: Config, vocab: int) -> ModelSpec:
        from parallelrun.models.module.inspection import read_spec

        return read_spec(config, vocab)


MODEL = UserModuleDefinition()
