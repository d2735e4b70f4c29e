"""Image classifiers: from an architecture to its ModelSpec."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import sqrt

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.models.vision import operations as ops
from parallelrun.models.vision.memory import backward_of
from parallelrun.planner.model import definitions
from parallelrun.planner.model.definitions import ModelDefinition
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec

KEYS = frozenset({"vocab", "image", "channels", "width", "label_smoothing"})  # of every image classifier
INDEX_ELEMENTS = 2  # an int64 index is as large as two elements of fp32
OPEN_SIZE = 224  # of images whose size neither the dataset nor the user gives (ImageNet's usual crop)


class ClassifierDefinition(ModelDefinition):
    """Base of the image classifiers. Subclasses implement `architecture` and `least_size`."""

    @abstractmethod
    def architecture(self, config: Config, image: int, classes: int) -> ops.Architecture:
        """The blocks for images of `image` x `image` pixels. Raises ConfigError for settings that make no sense."""

    @abstractmethod
    def least_size(self, config: Config) -> int:
        """The smallest height and width that the architecture can read."""

    def make(self, config: Config, vocab: int) -> ModelSpec:
        preset, shape = config.model.preset, _image_shape(config, self.least_size(config))
        if vocab < 1:
            message = f"model.vocab, the number of classes, is not known before dataset={config.dataset.name} is read"
            raise ConfigError(Problem(message, "model.vocab", "path=FOLDER, or model.vocab=1000"))
        blocks = self.architecture(config, shape[1], vocab)
        specs: list[BlockSpec] = []
        is_kept, is_split, before = True, False, shape  # the loader keeps the images
        for block in blocks:
            backward, is_kept = backward_of(block, before, is_kept, not specs, is_split)
            saved, replicated = (
                float(sum(step.kept + INDEX_ELEMENTS * step.indices for step in steps))
                for steps in (backward.steps, [step for step in backward.steps if not step.reads_split])
            )
            steps = block.steps(before)
            every = (operation.layer(block.name, shape_in) for operation, shape_in in steps)
            layers = tuple(layer for layer in every if layer is not None)
            flops = sum(operation.flops(shape_in) for operation, shape_in in steps)
            slid = sum(layer.convolution_flops for layer in layers)
            specs.append(
                BlockSpec(
                    block.name, block.kind, layers, flops, saved, before, backward, saves_after_sum=True,
                    convolution_flops=slid, replicated_elements=replicated, splits_input=is_split,
                )
            )  # fmt: skip
            before, is_split = block.out(before), ops.splits(block.operations, is_split)[-1]
        assert before == (vocab,), f"{preset} gives {before}"
        return ModelSpec(
            name=preset,
            kind="images",
            blocks=tuple(specs),
            sample_shape=shape,
            boundary_shape=before,
            targets_per_sample=1,
            vocab=vocab,
            num_layers=len(blocks),
        )


def _image_shape(config: Config, least: int) -> ops.Shape:
    """(channels, height, width) of the model's input: as asked, else the dataset's own, at least `least` wide."""
    own, preset = definitions.dataset(config).image_shape(config), config.model.preset
    if own is None:
        message = f"model={preset} reads images, and dataset={config.dataset.name} gives none"
        raise ConfigError(Problem(message, "dataset", "dataset=digits", "parallelrun ls datasets", kind="undefined"))
    channels, size = own
    requested = config.model.image
    if requested is not None and requested < least:
        message = f"model.image={requested}: {preset} needs images of at least {least} x {least} pixels"
        raise ConfigError(Problem(message, "model.image", f"model.image={least}", kind="arithmetic"))
    size = requested or max(least, size or OPEN_SIZE)
    return config.model.channels or channels, size, size


def num_per_stage(config: Config, default: Sequence[int]) -> list[int]:
    """`model.stages`: the number of layers or blocks of each stage. Raises ConfigError unless each is at least 1."""
    stages = list(config.model.stages) or list(default)
    if all(type(n) is int and n >= 1 for n in stages):
        return stages
    message = f"model.stages={stages} are not whole numbers of at least 1"
    raise ConfigError(Problem(message, "model.stages", f"model.stages={list(default)}".replace(" ", "")))


def in_turn(count: int) -> list[str]:
    """The roles of `count` convolutions in front of `three_linear_layers`: output and input channels are split in turn,
    so that the first linear layer reads split features. A first convolution without a partner has no role."""
    roles = ["column_parallel" if (count - index) % 2 else "row_parallel" for index in range(count)]
    return roles if count % 2 else ["", *roles[1:]]


def three_linear_layers(cells: int, ffn: int, classes: int, dropout_first: bool) -> ops.OperationBlock:
    """The classifier block of AlexNet and VGG: the image averaged to `cells` x `cells`, then three linear layers with
    dropout between them. Of the images, tensor parallelism has split the channels."""
    steps: list[ops.Operation] = [ops.AveragePoolOp(size=cells), ops.FlattenOp()]
    for number, role in (("1", "row_parallel"), ("2", "column_parallel")):
        linear = (ops.LinearOp(f"fc{number}", outputs=ffn, role=role, gain=1 / sqrt(3)), ops.ReluOp())
        dropout = ops.DropoutOp(f"dropout{number}")
        steps += [dropout, *linear] if dropout_first else [*linear, dropout]
    return ops.OperationBlock("classifier", "head", (*steps, ops.LinearOp("fc3", outputs=classes, role="row_parallel")))
