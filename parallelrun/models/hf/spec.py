"""The definition of `model=hf`. The spec is read off the module that transformers builds, which needs torch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import ModelSpec


class HuggingFaceDefinition(ModelDefinition):
    """See the package's docstring."""

    own_keys = frozenset({"path", "hf", "task", "roles", "vocab", "seq", "label_smoothing", "norm_samples",
                          "mask_token", "lora", "before", "blocks"})  # fmt: skip

    packs = True  # where the class can: `text_inputs.unpackable`
    their_prefix = "module."

    def make(self, config: Config, vocab: int) -> ModelSpec:
        path = config.model.path
        if path is None:
            message = "model=hf needs a configuration of transformers"
            fix = "model.path=./my_model (a directory with config.json) or model.path=LlamaForCausalLM"
            raise ConfigError(Problem(message, "model.path", fix))
        file = Path(path).expanduser()
        if ("/" in path or file.exists()) and not (file.is_file() or (file / "config.json").is_file()):
            raise ConfigError(Problem(f"there is no config.json in {file.absolute()}", "model.path"))
        if find_spec("transformers") is None:
            problem = Problem("model=hf needs the package transformers", "model", "pip install 'parallelrun[hf]'")
            raise EnvironmentProblem(problem)
        from parallelrun.models.hf.builder import samples_of
        from parallelrun.models.module.inspection import read_spec

        return replace(read_spec(config, vocab), **samples_of(config, vocab))


MODEL = HuggingFaceDefinition()
