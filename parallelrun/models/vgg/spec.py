"""The architecture of a VGG."""

from __future__ import annotations

from parallelrun.config.schema.run_schema import Config
from parallelrun.models.vision import operations as ops
from parallelrun.models.vision.spec import KEYS, ClassifierDefinition, in_turn, num_per_stage, three_linear_layers

VGG16 = (2, 2, 3, 3, 3)
WIDEST = 8  # times the first stage's channels


class VggDefinition(ClassifierDefinition):
    """Blocks `features.<stage>.<convolution>`, `classifier`. `model.width` (64): channels of the first stage, doubled
    per stage up to eight times; `model.ffn` (4096): width of the two large layers."""

    own_keys = KEYS | {"stages", "ffn", "dropout"}

    def least_size(self, config: Config) -> int:
        return int(2 ** len(num_per_stage(config, VGG16)))

    def architecture(self, config: Config, image: int, classes: int) -> ops.Architecture:
        blocks = []
        stages = num_per_stage(config, VGG16)
        roles = iter(in_turn(sum(stages)))
        for stage, count in enumerate(stages):
            outputs = config.model.width * min(2**stage, WIDEST)
            for index in range(count):
                convolution = ops.ConvolutionOp("convolution", outputs=outputs, bias=True, role=next(roles))
                pool = (ops.MaxPoolOp(),) if index == count - 1 else ()
                steps = (convolution, ops.ReluOp(), *pool)
                blocks.append(ops.OperationBlock(f"features.{stage}.{index}", "convolution", steps))
        return (*blocks, three_linear_layers(7, config.model.ffn or 4096, classes, dropout_first=False))


MODEL = VggDefinition()
