"""The architecture of a residual network."""

from __future__ import annotations

from parallelrun.config.schema.run_schema import Config
from parallelrun.models.vision import operations as ops
from parallelrun.models.vision.spec import KEYS, ClassifierDefinition, num_per_stage

SMALL_IMAGES = 64  # below this size `auto` takes the small stem: the large one would discard most of an image
EXPANSION = 4


class ResNetDefinition(ClassifierDefinition):
    """Blocks `stem`, `stages.<stage>.<block>`, `head`."""

    own_keys = KEYS | {"stages", "bottleneck", "stem", "norm_eps", "norm_samples", "norm_momentum"}

    def least_size(self, config: Config) -> int:
        return 8

    def architecture(self, config: Config, image: int, classes: int) -> ops.Architecture:
        model = config.model
        blocks = [_stem(model.width, model.stem == "small" or (model.stem == "auto" and image < SMALL_IMAGES))]
        channels = model.width
        for stage, count in enumerate(num_per_stage(config, (2, 2, 2))):
            inner = model.width * 2**stage
            for index in range(count):
                stride = 2 if stage and not index else 1
                outputs = inner * EXPANSION if model.bottleneck else inner
                main = _bottleneck(inner, stride) if model.bottleneck else _basic(inner, stride)
                shortcut: tuple[ops.Operation, ...] = ()
                if stride > 1 or outputs != channels:
                    projection = ops.ConvolutionOp("shortcut", outputs=outputs, kernel=1, stride=stride, padding=0)
                    shortcut = (projection, ops.BatchNormOp("shortcut_norm"))
                blocks.append(ops.OperationBlock(f"stages.{stage}.{index}", "residual", main, shortcut))
                channels = outputs
        head = (ops.AveragePoolOp(size=1), ops.FlattenOp(), ops.LinearOp("classifier", outputs=classes))
        return (*blocks, ops.OperationBlock("head", "head", head))


def _stem(width: int, small: bool) -> ops.OperationBlock:
    kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    convolution = ops.ConvolutionOp("convolution", outputs=width, kernel=kernel, stride=stride, padding=padding)
    pool = () if small else (ops.MaxPoolOp(kernel=3, stride=2, padding=1),)
    return ops.OperationBlock("stem", "stem", (convolution, ops.BatchNormOp("norm"), ops.ReluOp(), *pool))


# Tensor parallelism splits a block's last two convolutions: one sum of activations in forward and one in backward, the
# fewest possible. The first two of a bottleneck would sum the gradient of its input, which is as large or larger.
def _basic(inner: int, stride: int) -> tuple[ops.Operation, ...]:
    return (
        ops.ConvolutionOp("convolution1", outputs=inner, stride=stride, role="column_parallel"),
        ops.BatchNormOp("norm1"), ops.ReluOp(),
        ops.ConvolutionOp("convolution2", outputs=inner, role="row_parallel"), ops.BatchNormOp("norm2"),
    )  # fmt: skip


def _bottleneck(inner: int, stride: int) -> tuple[ops.Operation, ...]:
    return (
        ops.ConvolutionOp("convolution1", outputs=inner, kernel=1, padding=0), ops.BatchNormOp("norm1"), ops.ReluOp(),
        ops.ConvolutionOp("convolution2", outputs=inner, stride=stride, role="column_parallel"),
        ops.BatchNormOp("norm2"), ops.ReluOp(),
        ops.ConvolutionOp("convolution3", outputs=inner * EXPANSION, kernel=1, padding=0, role="row_parallel"),
        ops.BatchNormOp("norm3"),
    )  # fmt: skip


MODEL = ResNetDefinition()
