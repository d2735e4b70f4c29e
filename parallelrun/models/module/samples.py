"""What one sample of a user's module is: its kind and shape, and a batch like those of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import DEFAULT_GLOBAL_BATCH, Config
from parallelrun.models import layers
from parallelrun.models.module import network, source
from parallelrun.models.module.own_loss import LossBatch
from parallelrun.planner.model.definitions import dataset

IMAGE_SIZE = 224  # where neither the images nor the module have one
Sizes = tuple[int, ...]


def kind_and_shape(config: Config, module: nn.Module) -> tuple[str, Sizes]:
    """(kind, shape of one sample): what the dataset says; else token ids for a module that embeds, images if it has 3
    dims, else features."""
    example = dataset(config).example(config)
    if example is not None:
        inputs = example[0]
        if isinstance(inputs, dict):
            return "features", (sum(array.size for array in inputs.values()),)
        kind = "tokens" if inputs.dtype.kind == "i" and inputs.ndim == 1 else "features"
        return "images" if inputs.ndim == 3 else kind, inputs.shape
    if any(isinstance(part, (nn.Embedding, layers.TokenEmbedding)) for part in module.modules()):
        return "tokens", (config.model.seq,)
    shape = _attribute(module, "sample_shape")
    if shape is None or callable(shape):  # a method of that name is no size
        shape = _image_shape(config, module) or (config.model.hidden,)
    if not isinstance(shape, (tuple, list)) or not shape or not all(type(size) is int and size > 0 for size in shape):
        title = source.builder_of(config).title(config)
        message = f"sample_shape={shape!r} of {title} is no shape of a sample, such as (3, 32, 32)"
        raise ConfigError(Problem(message, "model.source", "sample_shape = (channels, height, width), or (features,)"))
    return "images" if len(shape) == 3 else "features", tuple(shape)


def _image_shape(config: Config, module: nn.Module) -> Sizes | None:
    """Return the shape of the dataset's images as a module that begins with a convolution reads them: its channels, and
    the size of `model.image`, of its attribute `image_size`, or of the images. None for other data and modules."""
    images = dataset(config).image_shape(config)
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    if images is None or first is None:
        return None
    size = config.model.image or positive_attribute(module, "image_size") or images[1] or IMAGE_SIZE
    return first.in_channels, size, size


def example(config: Config, kind: str, shape: Sizes, device: str) -> Any:
    """Return the input of the module as training passes it: one sample, or for the user's own loss, which may compare
    samples, as many as a data replica has."""
    sample = dataset(config).example(config)
    num_samples = 1
    if config.model.loss:
        of_replica = (config.global_batch or DEFAULT_GLOBAL_BATCH) // (config.dp or 1)
        num_samples = config.micro_batch or config.local_batch or max(1, of_replica)
    if sample is None:
        inputs: Any = network.inputs(kind, shape, num_samples, device)
        targets = torch.zeros(num_samples, dtype=torch.int64, device=device)
    else:
        inputs, targets = (_copies(part, num_samples, device) for part in sample)
    if not config.model.loss:
        return inputs
    return LossBatch(inputs, targets, torch.arange(num_samples, device="cpu"), config.seed)


def _copies(array: Any, number: int, device: str) -> Any:
    if isinstance(array, dict):
        return {name: _copies(value, number, device) for name, value in array.items()}
    return torch.stack([torch.as_tensor(array, device=device)] * number)


def _attribute(module: nn.Module, name: str) -> Any:
    """The value of an attribute of the user's module; None if it has none, or reading it fails."""
    try:
        return getattr(module, name, None)
    except Exception:  # a property of the user's may raise anything
        return None


def positive_attribute(module: nn.Module, name: str) -> int:
    """An attribute that is a positive whole number; 0 if it is none: the user may call anything `heads`."""
    value = _attribute(module, name)
    return value if type(value) is int and value > 0 else 0
