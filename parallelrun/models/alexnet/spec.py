"""AlexNet in one column (Krizhevsky 2014, arXiv 1404.5997), in the 61.1M-parameter form of torchvision. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.vision import spec as vision
from parallelrun.models.vision.architecture import (
    AveragePool,
    Block,
    Convolution,
    Dropout,
    Flatten,
    Linear,
    MaxPool,
    Operation,
    Relu,
)

LEAST = 64  # three poolings behind a stride of 4
FFN = 4096


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the AlexNet that `config.model` describes, over `vocab` classes. Raises ConfigError."""
    shape = vision.image_shape(config, LEAST)
    return vision.make(config, architecture(config, shape[1], vocab), shape, vocab)


def architecture(config: Config, image: int, classes: int) -> tuple[Block, ...]:
    """Blocks `features.0` ... `features.4`, `classifier`. `model.width` (64) scales the channels, `model.ffn` (4096) is
    the width of the two large layers, which hold most of the parameters."""
    width = config.model.width
    pool = MaxPool(kernel=3, stride=2)
    first = Convolution("convolution", outputs=width, kernel=11, stride=4, padding=2, bias=True)
    second = Convolution("convolution", outputs=3 * width, kernel=5, padding=2, bias=True)
    rest = [Convolution("convolution", outputs=outputs, bias=True) for outputs in (6 * width, 4 * width, 4 * width)]
    pooled = (True, True, False, False, True)
    blocks = [
        Block(f"features.{index}", "convolution", (convolution, Relu(), *((pool,) if pools else ())))
        for index, (convolution, pools) in enumerate(zip((first, second, *rest), pooled))
    ]
    return (*blocks, classifier(6, config.model.ffn or FFN, classes, dropout_first=True))


def classifier(places: int, ffn: int, classes: int, dropout_first: bool) -> Block:
    """The three linear layers of AlexNet and VGG on `places` x `places` averaged places, with dropout between them."""
    columns, row = Linear("fc1", outputs=ffn, role="columns"), Linear("fc2", outputs=ffn, role="row")
    drops: tuple[Operation, ...] = (Dropout("dropout1"), Dropout("dropout2"))
    inside = (drops[0], columns, Relu(), drops[1], row, Relu()) if dropout_first else (
        columns, Relu(), drops[0], row, Relu(), drops[1])  # fmt: skip
    return Block("classifier", "head", (AveragePool(size=places), Flatten(), *inside, Linear("fc3", outputs=classes)))
