"""The architecture of AlexNet."""

from __future__ import annotations

from dataclasses import replace

from parallelrun.config.schema.run_schema import Config
from parallelrun.models.vision import operations as ops
from parallelrun.models.vision.spec import KEYS, ClassifierDefinition, in_turn, three_linear_layers


class AlexNetDefinition(ClassifierDefinition):
    """Blocks `features.0` ... `features.4`, `classifier`. `model.width` (64) scales the channels, `model.ffn` (4096) is
    the width of the two large layers."""

    own_keys = KEYS | {"ffn", "dropout"}

    def least_size(self, config: Config) -> int:
        return 64  # three poolings after a stride of 4

    def architecture(self, config: Config, image: int, classes: int) -> ops.Architecture:
        width = config.model.width
        convolutions = [
            ops.ConvolutionOp("convolution", outputs=width, kernel=11, stride=4, padding=2, bias=True),
            ops.ConvolutionOp("convolution", outputs=3 * width, kernel=5, padding=2, bias=True),
            *(ops.ConvolutionOp("convolution", outputs=scale * width, bias=True) for scale in (6, 4, 4)),
        ]
        blocks = []
        for index, (convolution, role) in enumerate(zip(convolutions, in_turn(len(convolutions)))):
            convolution = replace(convolution, role=role)
            pool = (ops.MaxPoolOp(kernel=3, stride=2),) if index in (0, 1, 4) else ()
            blocks.append(ops.OperationBlock(f"features.{index}", "convolution", (convolution, ops.ReluOp(), *pool)))
        return (*blocks, three_linear_layers(6, config.model.ffn or 4096, classes, dropout_first=True))


MODEL = AlexNetDefinition()
