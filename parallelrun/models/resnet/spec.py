"""Residual networks for images (He et al. 2016; for small images, section 4.2 of the paper). Torch-free.

The stride of a bottleneck is on its 3x3 convolution, as in torchvision and most reports of "ResNet-50".
"""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.errors import ConfigError, Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.models.vision import spec as vision
from parallelrun.models.vision.architecture import (
    AveragePool,
    BatchNorm,
    Block,
    Convolution,
    Flatten,
    Linear,
    MaxPool,
    Operation,
    Relu,
)

STEMS = ("auto", "small", "large")
SMALL_IMAGES = 64  # below, `auto` keeps the stem from throwing away most of an image
EXPANSION = 4


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the ResNet that `config.model` describes, over `vocab` classes. Raises ConfigError."""
    shape = vision.image_shape(config, least=8)
    return vision.make(config, architecture(config, shape[1], vocab), shape, vocab)


def architecture(config: Config, image: int, classes: int) -> tuple[Block, ...]:
    """Blocks `stem`, `stages.<stage>.<block>`, `head`. Raises ConfigError for an unknown stem or wrong stages."""
    model = config.model
    if model.stem not in STEMS:
        fix = " or ".join(f"model.stem={stem}" for stem in STEMS)
        raise ConfigError(Problem(f"model.stem={model.stem} is unknown", "model.stem", fix))
    blocks = [_stem(model.width, model.stem == "small" or (model.stem == "auto" and image < SMALL_IMAGES))]
    channels = model.width
    for stage, count in enumerate(vision.stages(config, (2, 2, 2))):
        inner = model.width * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            outputs = inner * EXPANSION if model.bottleneck else inner
            main = _bottleneck(inner, stride) if model.bottleneck else _basic(inner, stride)
            shortcut: tuple[Operation, ...] = ()
            if stride > 1 or outputs != channels:
                shortcut = (Convolution("shortcut", outputs=outputs, kernel=1, stride=stride, padding=0),
                            BatchNorm("shortcut_norm"))  # fmt: skip
            blocks.append(Block(f"stages.{stage}.{index}", "residual", main, shortcut))
            channels = outputs
    head = (AveragePool(size=1), Flatten(), Linear("classifier", outputs=classes))
    return (*blocks, Block("head", "head", head))


def _stem(width: int, small: bool) -> Block:
    if small:
        return Block("stem", "stem", (Convolution("convolution", outputs=width), BatchNorm("norm"), Relu()))
    convolution = Convolution("convolution", outputs=width, kernel=7, stride=2, padding=3)
    pool = MaxPool(kernel=3, stride=2, padding=1)
    return Block("stem", "stem", (convolution, BatchNorm("norm"), Relu(), pool))


def _basic(inner: int, stride: int) -> tuple[Operation, ...]:
    return (
        Convolution("convolution1", outputs=inner, stride=stride), BatchNorm("norm1"), Relu(),
        Convolution("convolution2", outputs=inner), BatchNorm("norm2"),
    )  # fmt: skip


def _bottleneck(inner: int, stride: int) -> tuple[Operation, ...]:
    return (
        Convolution("convolution1", outputs=inner, kernel=1, padding=0), BatchNorm("norm1"), Relu(),
        Convolution("convolution2", outputs=inner, stride=stride), BatchNorm("norm2"), Relu(),
        Convolution("convolution3", outputs=inner * EXPANSION, kernel=1, padding=0), BatchNorm("norm3"),
    )  # fmt: skip
