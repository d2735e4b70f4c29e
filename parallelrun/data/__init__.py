"""Datasets and the plan-independent order of samples. numpy only: nothing here imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.data.derived import halve, mask
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import Dataset
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.model.model_spec.text import HALVES


def open_dataset(config: Config, spec: ModelSpec) -> Dataset:
    """The dataset that the config names, its samples as the model wants them: next tokens, or masked ones.

    Fast enough to be called before any rank is started. Raises EnvironmentProblem (exit 3) for data that are missing,
    unreadable or too small for one global batch, and ConfigError for a model that reads other samples.
    """
    if problems := definitions.check_samples(config, spec):
        raise ConfigError(*problems)
    definition = definitions.dataset(config)
    tokenizer = definition.tokenizer(config)
    settings = {"seed": config.seed, **_of_model(spec), **definition.settings(config)}
    identity = tokenizer.sha256 if tokenizer else None
    dataset = replace(definition.open(config, spec), tokenizer=identity, settings=settings)
    if spec.text is not None and spec.text.kind == HALVES:
        return halve(dataset)
    return dataset if spec.mask_token is None else mask(dataset, spec, config.seed)


def _of_model(spec: ModelSpec) -> dict[str, Any]:
    """The keys of the model that decide what a sample is."""
    if spec.kind == "images":
        return {"model.image": spec.sample_shape[-1]}
    return {"model.seq": spec.seq, "model.mask_token": spec.mask_token} if spec.kind == "tokens" else {}
