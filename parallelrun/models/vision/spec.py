"""From an architecture to its ModelSpec, and the sizes that all image classifiers share. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import BlockSpec, LayerSpec, ModelSpec

from .architecture import Block, Shape, flow, kept_elements

OPEN_SIZE = 224  # of images whose size neither the dataset nor the user says (ImageNet's usual crop)


def image_shape(config: Config, least: int) -> Shape:
    """(channels, height, width) of what the model reads: as asked, else the dataset's own, at least `least` wide.

    Raises ConfigError for a dataset that gives no images, or for a size below `least`.
    """
    own = getattr(registry.load("datasets", config.dataset.name), "image_shape", None)
    if own is None:
        what = f"model={config.model.preset} reads images, and dataset={config.dataset.name} gives none"
        raise ConfigError(Problem(what, "dataset", "dataset=digits", "parallelrun ls datasets", kind="undefined"))
    channels, size = own(config)
    asked = config.model.image
    if asked is not None and asked < least:
        what = f"model.image={asked}: {config.model.preset} halves its images down to nothing below {least}"
        raise ConfigError(Problem(what, "model.image", f"model.image={least}", kind="arithmetic"))
    size = asked or max(least, size or OPEN_SIZE)
    return config.model.channels or channels, size, size


def stages(config: Config, default: Sequence[int]) -> list[int]:
    """`model.stages`: how many layers or blocks each stage has. Raises ConfigError unless each is at least 1."""
    given = list(config.model.stages) or list(default)
    if all(type(n) is int and n >= 1 for n in given):
        return given
    what = f"model.stages={given} are not whole numbers of at least 1"
    raise ConfigError(Problem(what, "model.stages", f"model.stages={list(default)}".replace(" ", "")))


def make(config: Config, blocks: Sequence[Block], shape: Shape, classes: int) -> ModelSpec:
    """The spec of `blocks` on images of `shape`, the last of which gives `classes` logits."""
    if classes < 1:
        what = f"model.vocab, the number of classes, is not known before dataset={config.dataset.name} is read"
        raise ConfigError(Problem(what, "model.vocab", "path=FOLDER, or model.vocab=1000"))
    specs, is_kept, at = [], True, shape  # the images are the loader's
    features = 0
    for block in blocks:
        kept, is_kept = kept_elements(block, at, is_kept)
        layers = _layers(block, at)
        features = next((layer.in_features for layer in layers if layer.layer_role in ("columns", "linear")), features)
        specs.append(BlockSpec(block.name, block.kind, layers, _flops(block, at), kept, input_shape=at))
        at = block.out(at)
    assert at == (classes,), f"{config.model.preset} gives {at}"
    return ModelSpec(
        name=config.model.preset,
        kind="images",
        blocks=tuple(specs),
        sample_shape=shape,
        boundary_shape=(features,),
        targets_per_sample=1,
        vocab=classes,
        num_layers=len(blocks),
    )


def _layers(block: Block, shape: Shape) -> tuple[LayerSpec, ...]:
    found = []
    for operations in (block.operations, block.shortcut or ()):
        for operation, before in zip(operations, flow(operations, shape)):
            layer = operation.layer(block.name, before)
            if layer is not None:
                found.append(layer)
    return tuple(found)


def _flops(block: Block, shape: Shape) -> float:
    return sum(
        operation.flops(before)
        for operations in (block.operations, block.shortcut or ())
        for operation, before in zip(operations, flow(operations, shape))
    )
