"""The operations of an image classifier as data, with the shapes that flow through them.

An architecture is a tuple of blocks of operations. Shapes are of one sample: (channels, height, width), or (features,)
after `FlattenOp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod, sqrt

from parallelrun.planner.model.model_spec import SAMPLE_SET_ROLE, Initialiser, LayerSpec, ParameterSpec, weight_and_bias

Shape = tuple[int, ...]
ZEROS, ONES = Initialiser("zeros"), Initialiser("ones")


@dataclass(frozen=True)
class Operation:
    """One step of a block. name: of its module inside the block; empty if it has no module.

    saves_input, saves_output: which of its tensors backward needs.
    """

    name: str = ""
    saves_input: bool = False
    saves_output: bool = False

    def out(self, shape: Shape) -> Shape:
        """The output shape for an input shape."""
        return shape

    def layer(self, block: str, shape: Shape) -> LayerSpec | None:
        """Its layer, if it has parameters or a layer role."""
        return None

    def flops(self, shape: Shape) -> float:
        """Forward FLOPs for one sample; only products are counted."""
        return 0.0


@dataclass(frozen=True)
class ConvolutionOp(Operation):
    """role: `column_parallel` (tensor parallelism splits its output channels), `row_parallel` (its input channels), or
    empty."""

    outputs: int = 0
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    bias: bool = False
    role: str = ""
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (self.outputs, *_slide(shape[1:], self.kernel, self.stride, self.padding))

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, weight = f"{block}.{self.name}", (self.outputs, shape[0], self.kernel, self.kernel)
        initialiser = Initialiser("normal", sqrt(2 / prod(weight[1:])))  # He et al. 2015: makes up for ReLU's halving
        parameters = weight_and_bias(name, weight, initialiser, self.role, self.bias)
        areas = prod(shape[1:]), prod(self.out(shape)[1:])
        return LayerSpec(name, self.role, shape[0], self.outputs, parameters, areas=areas)

    def flops(self, shape: Shape) -> float:
        return 2.0 * shape[0] * self.kernel**2 * prod(self.out(shape))


@dataclass(frozen=True)
class BatchNormOp(Operation):
    """Normalisation per channel over samples, height and width; its running statistics are frozen parameters."""

    saves_input: bool = True

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, role = f"{block}.{self.name}", SAMPLE_SET_ROLE
        parameters = tuple(
            ParameterSpec(f"{name}.{key}", shape[:1], initialiser, role, frozen=key.startswith("running"))
            for key, initialiser in zip(("weight", "bias", "running_mean", "running_var"), (ONES, ZEROS, ZEROS, ONES))
        )
        return LayerSpec(name, role, shape[0], shape[0], parameters)


@dataclass(frozen=True)
class ReluOp(Operation):
    saves_output: bool = True


@dataclass(frozen=True)
class MaxPoolOp(Operation):
    kernel: int = 2
    stride: int = 2
    padding: int = 0
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (shape[0], *_slide(shape[1:], self.kernel, self.stride, self.padding))


@dataclass(frozen=True)
class AveragePoolOp(Operation):
    """Averages an image of any size into `size` x `size` cells."""

    size: int = 1
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (shape[0], self.size, self.size)


@dataclass(frozen=True)
class FlattenOp(Operation):
    def out(self, shape: Shape) -> Shape:
        return (prod(shape),)


@dataclass(frozen=True)
class DropoutOp(Operation):
    def layer(self, block: str, shape: Shape) -> LayerSpec:
        return LayerSpec(f"{block}.{self.name}", "dropout", shape[0], shape[0])


@dataclass(frozen=True)
class LinearOp(Operation):
    """role: `column_parallel`, `row_parallel`, or `linear`, which is never split. gain: of its initial weights. No ReLU
    follows the last layer, and small logits let the loss start at log(classes)."""

    outputs: int = 0
    role: str = "linear"
    gain: float = 0.1
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (self.outputs,)

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, inputs = f"{block}.{self.name}", shape[0]
        initialiser = Initialiser("normal", self.gain / sqrt(inputs))
        parameters = weight_and_bias(name, (self.outputs, inputs), initialiser, self.role)
        return LayerSpec(name, self.role, inputs, self.outputs, parameters)

    def flops(self, shape: Shape) -> float:
        return 2.0 * shape[0] * self.outputs


@dataclass(frozen=True)
class OperationBlock:
    """Operations in sequence; with a shortcut (empty: the input itself), relu(operations(x) + shortcut(x))."""

    name: str
    kind: str
    operations: tuple[Operation, ...]
    shortcut: tuple[Operation, ...] | None = None

    def out(self, shape: Shape) -> Shape:
        """The output shape for an input shape."""
        return flow(self.operations, shape)[-1]

    def steps(self, shape: Shape) -> list[tuple[Operation, Shape]]:
        """Every operation, those of the shortcut last, with the shape of its input."""
        branches = (self.operations, self.shortcut or ())
        return [pair for branch in branches for pair in zip(branch, flow(branch, shape))]


Architecture = tuple[OperationBlock, ...]


def flow(operations: Iterable[Operation | OperationBlock], shape: Shape) -> list[Shape]:
    """The shapes before, between and after operations or blocks."""
    shapes = [shape]
    for operation in operations:
        shapes.append(operation.out(shapes[-1]))
    return shapes


def splits(operations: Iterable[Operation], is_split: bool) -> list[bool]:
    """Whether tensor parallelism splits channels before, between and after operations; is_split: before the first."""
    states = [is_split]
    for operation in operations:
        role = operation.role if isinstance(operation, ConvolutionOp | LinearOp) else ""
        states.append({"column_parallel": True, "row_parallel": False}.get(role, states[-1]))
    return states


def _slide(sizes: Shape, kernel: int, stride: int, padding: int) -> Shape:
    return tuple((size + 2 * padding - kernel) // stride + 1 for size in sizes)
