"""Datasets and the plan-independent order of samples. numpy only: nothing here imports torch."""

from __future__ import annotations

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.data.dataset import Dataset, Split, collate
from parallelrun.data.masked import mask
from parallelrun.model_spec import ModelSpec

__all__ = ["Dataset", "Split", "collate", "notes", "open_dataset"]


def open_dataset(config: Config, spec: ModelSpec) -> Dataset:
    """The dataset that the config names, its samples as the model wants them (next tokens, or masked ones).

    Fast enough to be called before any rank is started. Raises EnvironmentProblem (exit 3) for data that is missing,
    unreadable or too small for one global batch.
    """
    dataset: Dataset = registry.load("datasets", config.dataset.name).open(config, spec)
    return dataset if spec.mask_token is None else mask(dataset, spec, config.seed)


def notes(config: Config, spec: ModelSpec, dataset: Dataset) -> list[str]:
    """Sentences about the data that the user should read before a run: images that the model gets enlarged."""
    module = registry.load("datasets", config.dataset.name)
    if hasattr(module, "notes"):
        return list(module.notes(config, spec, dataset))
    _, own = module.image_shape(config) if hasattr(module, "image_shape") else (0, None)
    read = spec.sample_shape[-1] if len(spec.sample_shape) == 3 else 0
    if own is None or own >= read:
        return []
    size = f"{own} x {own} pixels, and model={config.model.preset} reads {read} x {read}"
    return [f"the images of dataset={config.dataset.name} have {size}: they are enlarged"]
