"""Datasets and the plan-independent order of samples. numpy only: nothing here imports torch."""

from __future__ import annotations

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.data.dataset import Dataset, Split, collate
from parallelrun.data.masked import mask
from parallelrun.models.spec import ModelSpec

__all__ = ["Dataset", "Split", "collate", "open_dataset"]


def open_dataset(config: Config, spec: ModelSpec) -> Dataset:
    """The dataset that the config names, its samples as the model wants them (next tokens, or masked ones).

    Fast enough to be called before any rank is started. Raises EnvironmentProblem (exit 3) for data that is missing,
    unreadable or too small for one global batch.
    """
    dataset: Dataset = registry.load("datasets", config.dataset.name).open(config, spec)
    return dataset if spec.mask_token is None else mask(dataset, spec, config.seed)
