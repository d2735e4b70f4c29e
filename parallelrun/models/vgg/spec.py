"""VGG (Simonyan and Zisserman 2015): stages of 3x3 convolutions between poolings; 2, 2, 3, 3, 3 of them is VGG-16.

Torch-free.
"""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.model_spec import ModelSpec
from parallelrun.models.alexnet.spec import FFN, classifier
from parallelrun.models.vision import spec as vision
from parallelrun.models.vision.architecture import Block, Convolution, MaxPool, Operation, Relu

VGG16 = (2, 2, 3, 3, 3)
WIDEST = 8  # times the first stage's channels


def make(config: Config, vocab: int) -> ModelSpec:
    """The spec of the VGG that `config.model` describes, over `vocab` classes. Raises ConfigError."""
    shape = vision.image_shape(config, least=2 ** len(vision.stages(config, VGG16)))
    return vision.make(config, architecture(config, shape[1], vocab), shape, vocab)


def architecture(config: Config, image: int, classes: int) -> tuple[Block, ...]:
    """Blocks `features.<stage>.<convolution>`, `classifier`. `model.width` (64): channels of the first stage, doubled
    per stage up to eight times; `model.ffn` (4096): width of the two large layers."""
    blocks = []
    for stage, count in enumerate(vision.stages(config, VGG16)):
        outputs = config.model.width * min(2**stage, WIDEST)
        for index in range(count):
            convolution = Convolution("convolution", outputs=outputs, bias=True)
            inside: tuple[Operation, ...] = (convolution, Relu(), *((MaxPool(),) if index == count - 1 else ()))
            blocks.append(Block(f"features.{stage}.{index}", "convolution", inside))
    return (*blocks, classifier(7, config.model.ffn or FFN, classes, dropout_first=False))
