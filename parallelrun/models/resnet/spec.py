"""The architecture of a residual network. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.models.vision.operations import (
    Architecture,
    AveragePoolOp,
    BatchNormOp,
    ConvolutionOp,
    FlattenOp,
    LinearOp,
    MaxPoolOp,
    Operation,
    OperationBlock,
    ReluOp,
)
from parallelrun.models.vision.spec import ClassifierDefinition, num_per_stage

SMALL_IMAGES = 64  # below this size `auto` takes the small stem: the large one would discard most of an image
EXPANSION = 4


class ResNetDefinition(ClassifierDefinition):
    """Blocks `stem`, `stages.<stage>.<block>`, `head`."""

    def least_size(self, config: Config) -> int:
        return 8

    def architecture(self, config: Config, image: int, classes: int) -> Architecture:
        model = config.model
        blocks = [_stem(model.width, model.stem == "small" or (model.stem == "auto" and image < SMALL_IMAGES))]
        channels = model.width
        for stage, count in enumerate(num_per_stage(config, (2, 2, 2))):
            inner = model.width * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                outputs = inner * EXPANSION if model.bottleneck else inner
                main = _bottleneck(inner, stride) if model.bottleneck else _basic(inner, stride)
                shortcut: tuple[Operation, ...] = ()
                if stride > 1 or outputs != channels:
                    projection = ConvolutionOp("shortcut", outputs=outputs, kernel=1, stride=stride, padding=0)
                    shortcut = (projection, BatchNormOp("shortcut_norm"))
                blocks.append(OperationBlock(f"stages.{stage}.{index}", "residual", main, shortcut))
                channels = outputs
        head = (AveragePoolOp(size=1), FlattenOp(), LinearOp("classifier", outputs=classes))
        return (*blocks, OperationBlock("head", "head", head))


def _stem(width: int, small: bool) -> OperationBlock:
    if small:
        return OperationBlock(
            "stem", "stem", (ConvolutionOp("convolution", outputs=width), BatchNormOp("norm"), ReluOp())
        )
    convolution = ConvolutionOp("convolution", outputs=width, kernel=7, stride=2, padding=3)
    pool = MaxPoolOp(kernel=3, stride=2, padding=1)
    return OperationBlock("stem", "stem", (convolution, BatchNormOp("norm"), ReluOp(), pool))


def _basic(inner: int, stride: int) -> tuple[Operation, ...]:
    return (
        ConvolutionOp("convolution1", outputs=inner, stride=stride), BatchNormOp("norm1"), ReluOp(),
        ConvolutionOp("convolution2", outputs=inner), BatchNormOp("norm2"),
    )  # fmt: skip


def _bottleneck(inner: int, stride: int) -> tuple[Operation, ...]:
    return (
        ConvolutionOp("convolution1", outputs=inner, kernel=1, padding=0), BatchNormOp("norm1"), ReluOp(),
        ConvolutionOp("convolution2", outputs=inner, stride=stride), BatchNormOp("norm2"), ReluOp(),
        ConvolutionOp("convolution3", outputs=inner * EXPANSION, kernel=1, padding=0), BatchNormOp("norm3"),
    )  # fmt: skip


MODEL = ResNetDefinition()
