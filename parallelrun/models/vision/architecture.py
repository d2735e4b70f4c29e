"""What an image classifier is made of, as data: operations in blocks, with the shapes that flow through. Torch-free.

Shapes are of one sample: (channels, height, width), or (features,) behind `Flatten`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod, sqrt

from parallelrun.model_spec import SAMPLE_SET_ROLE, Initialiser, LayerSpec, ParameterSpec

Shape = tuple[int, ...]
INDEX_ELEMENTS = 2  # a position that max-pooling keeps is an int64: two elements of fp32
ZEROS, ONES = Initialiser("zeros"), Initialiser("ones")


@dataclass(frozen=True)
class Operation:
    """One step of a block. name: of its module inside the block; empty where it has none.

    saves_input, saves_output: which of its tensors backward needs.
    """

    name: str = ""
    saves_input: bool = False
    saves_output: bool = False

    def out(self, shape: Shape) -> Shape:
        """The shape it gives for one of that shape."""
        return shape

    def layer(self, block: str, shape: Shape) -> LayerSpec | None:
        """Its layer, if it has parameters or a layer role."""
        return None

    def flops(self, shape: Shape) -> float:
        """Of the forward pass of one sample; only products are counted."""
        return 0.0


@dataclass(frozen=True)
class Convolution(Operation):
    outputs: int = 0
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    bias: bool = False
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (self.outputs, *(_slide(size, self.kernel, self.stride, self.padding) for size in shape[1:]))

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, weight = f"{block}.{self.name}", (self.outputs, shape[0], self.kernel, self.kernel)
        # He et al. 2015: what ReLU halves, the weights double
        parameters = [ParameterSpec(f"{name}.weight", weight, Initialiser("normal", sqrt(2 / prod(weight[1:]))), "")]
        if self.bias:
            parameters.append(ParameterSpec(f"{name}.bias", (self.outputs,), ZEROS, ""))
        return LayerSpec(name, "", shape[0], self.outputs, tuple(parameters))

    def flops(self, shape: Shape) -> float:
        return 2.0 * shape[0] * self.kernel**2 * prod(self.out(shape))


@dataclass(frozen=True)
class BatchNorm(Operation):
    """Over samples and places, per channel; its running statistics are frozen parameters."""

    saves_input: bool = True

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, role = f"{block}.{self.name}", SAMPLE_SET_ROLE
        parameters = (
            ParameterSpec(f"{name}.weight", shape[:1], ONES, role),
            ParameterSpec(f"{name}.bias", shape[:1], ZEROS, role),
            ParameterSpec(f"{name}.running_mean", shape[:1], ZEROS, role, frozen=True),
            ParameterSpec(f"{name}.running_var", shape[:1], ONES, role, frozen=True),
        )
        return LayerSpec(name, role, shape[0], shape[0], parameters)


@dataclass(frozen=True)
class Relu(Operation):
    saves_output: bool = True


@dataclass(frozen=True)
class MaxPool(Operation):
    kernel: int = 2
    stride: int = 2
    padding: int = 0
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (shape[0], *(_slide(size, self.kernel, self.stride, self.padding) for size in shape[1:]))


@dataclass(frozen=True)
class AveragePool(Operation):
    """To `size` x `size` places, whatever arrives."""

    size: int = 1
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (shape[0], self.size, self.size)


@dataclass(frozen=True)
class Flatten(Operation):
    def out(self, shape: Shape) -> Shape:
        return (prod(shape),)


@dataclass(frozen=True)
class Dropout(Operation):
    def layer(self, block: str, shape: Shape) -> LayerSpec:
        return LayerSpec(f"{block}.{self.name}", "dropout", shape[0], shape[0])


@dataclass(frozen=True)
class Linear(Operation):
    """role: `columns` and `row` where a tensor strategy may split the pair, else `linear`."""

    outputs: int = 0
    role: str = "linear"
    saves_input: bool = True

    def out(self, shape: Shape) -> Shape:
        return (self.outputs,)

    def layer(self, block: str, shape: Shape) -> LayerSpec:
        name, inputs = f"{block}.{self.name}", shape[0]
        # the last layer is followed by no ReLU, and small logits start the loss at log(classes)
        std = (1 / sqrt(3) if self.role != "linear" else 0.1) / sqrt(inputs)
        weight = ParameterSpec(f"{name}.weight", (self.outputs, inputs), Initialiser("normal", std), self.role)
        bias = ParameterSpec(f"{name}.bias", (self.outputs,), ZEROS, self.role)
        return LayerSpec(name, self.role, inputs, self.outputs, (weight, bias))

    def flops(self, shape: Shape) -> float:
        return 2.0 * shape[0] * self.outputs


@dataclass(frozen=True)
class Block:
    """Operations one after the other; with a shortcut (empty: the input itself), relu(operations(x) + shortcut(x))."""

    name: str
    kind: str
    operations: tuple[Operation, ...]
    shortcut: tuple[Operation, ...] | None = None

    def out(self, shape: Shape) -> Shape:
        """The shape it gives for one of that shape."""
        return flow(self.operations, shape)[-1]


def flow(operations: Iterable[Operation], shape: Shape) -> list[Shape]:
    """The shapes before, between and after the operations."""
    shapes = [shape]
    for operation in operations:
        shapes.append(operation.out(shapes[-1]))
    return shapes


def kept_elements(block: Block, shape: Shape, input_is_kept: bool) -> tuple[float, bool]:
    """(elements of one sample that backward needs, is the block's output among them). Each tensor counts once.

    input_is_kept: what came before keeps the block's input already.
    """
    kept, first_kept, output_kept = 0.0, input_is_kept, False
    for operations in (block.operations, block.shortcut or ()):
        shapes, known = flow(operations, shape), first_kept
        for operation, before, after in zip(operations, shapes, shapes[1:]):
            if operation.saves_input and not known:
                kept += prod(before)
                first_kept = first_kept or before is shapes[0]
            if isinstance(operation, MaxPool):
                kept += INDEX_ELEMENTS * prod(after)
            keeps = operation.saves_output
            kept += prod(after) if keeps else 0
            known = keeps or (known and isinstance(operation, Flatten | Dropout))
        output_kept = known if operations is block.operations else output_kept
    if block.shortcut is not None:  # the ReLU behind the sum
        return kept + prod(block.out(shape)), True
    return kept, output_kept


def _slide(size: int, kernel: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - kernel) // stride + 1
