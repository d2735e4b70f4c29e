"""Blocks of the lesson's matrices on one rank, and the collectives of a product on them, each described in a line.

Blocks may be uneven or empty, so they are padded to the largest before they are gathered or scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.layout import Layout, chunk_range
from parallelrun.mesh import Group, Mesh
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.product import ActivationLayout, Move, Product

PURPOSE = "lesson"
DIMS = {"rows": 0, "features": 1}


@dataclass(frozen=True)
class MatrixBlock:
    """A named block of a matrix on this rank: its Layout, its ranges in the full matrix, its numbers.

    W and dW are (columns, inner), as parameters are stored; they are shown as in Y = X W.
    """

    name: str
    layout: Layout
    ranges: tuple[tuple[int, int], ...]
    numbers: Tensor

    def part_of(self, matrix: Tensor) -> Tensor:
        """The same block of another matrix of that shape."""
        return matrix[tuple(slice(*pair) for pair in self.ranges)]

    @property
    def is_weight(self) -> bool:
        return self.name.endswith("W")

    @property
    def title(self) -> str:
        """`X[0:2, 0:5]`."""
        rows, columns = (f"{start}:{stop}" for start, stop in (self.ranges[::-1] if self.is_weight else self.ranges))
        return f"{self.name}[{rows}, {columns}]"

    @property
    def size(self) -> str:
        """`4x8 = 32 numbers`."""
        rows, columns = self.numbers.shape[::-1] if self.is_weight else self.numbers.shape
        return f"{rows}x{columns} = {self.numbers.numel()} numbers"


class BlockOperations:
    """The collectives of one product over the mesh.

    matrices: the full "X", "W" (columns, inner) and "Y" (its gradient). told: a line for each collective.
    """

    def __init__(self, product: Product, matrices: Mapping[str, Tensor], shape: MeshShape, mesh: Mesh):
        self.product, self._matrices, self._shape, self._mesh = product, matrices, shape, mesh
        self._layouts = {"X": _layout(product.x), "W": product.weight, "Y": _layout(product.y)}
        self.num_panels = shape.size(product.x.features[0]) if product.panels else 0
        self.told: list[str] = []

    def take_told(self, prefix: str) -> list[str]:
        lines, self.told = [f"{prefix}: {line}" for line in self.told], []
        return lines

    def held(self, name: str) -> MatrixBlock:
        """The block of X, W or dY that this rank has before anything is sent."""
        block = self._block(name, self._layouts[name.removeprefix("d")])
        matrix = self._matrices[name.removeprefix("d")]
        return MatrixBlock(name, block.layout, block.ranges, block.part_of(matrix).contiguous())

    def computed(self, name: str, layout: ActivationLayout, numbers: Tensor) -> MatrixBlock:
        """Numbers just computed, as a block of an activation."""
        return self._block(name, _layout(layout), numbers)

    def gather(self, block: MatrixBlock, move: Move | None) -> MatrixBlock:
        """All-gather of an activation along a dim."""
        return block if move is None else self._gather(block, DIMS[move.dim], move.axis)

    def gather_weight(self, block: MatrixBlock) -> MatrixBlock:
        """All-gather of W along its dim 0 over each axis, minor-most first."""
        for axis in self.product.gather_w:
            block = self._gather(block, 0, axis)
        return block

    def reduce(self, block: MatrixBlock, move: Move | None, sum_axis: str | None) -> MatrixBlock:
        """Reduce-scatter along `move`, or all-reduce over `sum_axis`, or neither."""
        if sum_axis:
            self._sum(block, sum_axis)
        return block if move is None else self._scatter(block, DIMS[move.dim], move.axis)

    def weight_gradient(self, numbers: Tensor) -> MatrixBlock:
        """dW from its partial sums: reduce-scattered where W was gathered, all-reduced over the copies of W."""
        block = self._block("dW", self.product.gathered_weight, numbers)
        for axis in reversed(self.product.gather_w):
            block = self._scatter(block, 0, axis)
        for axis in self.product.partial_weight:
            self._sum(block, axis)
        return block

    def panel(self, block: MatrixBlock, step: int) -> MatrixBlock:
        """SUMMA: the block of the inner dim's panel `step`, broadcast by the rank of this row (column) that has it."""
        axis = block.layout.dims[1][0]
        group = self._mesh.group(axis)
        owner = self._block(block.name, block.layout, coordinate={**self._mesh.coordinate, axis: step})
        shape = tuple(stop - start for start, stop in owner.ranges)
        numbers = block.numbers.clone() if group.index == step else block.numbers.new_empty(shape)
        comm.broadcast(numbers, group, PURPOSE, step)
        self.told.append(f"{owner.title} comes from rank {group.ranks[step]} over {axis}")
        return MatrixBlock(block.name, block.layout, owner.ranges, numbers)

    def reduce_panel(self, name: str, numbers: Tensor, step: int, so_far: Tensor) -> Tensor:
        """Sum partial gradients of panel `step` on the rank that has it; returns this rank's gradient so far."""
        layout = self._layouts[name[1:]]
        group = self._mesh.group(layout.dims[1][0])
        numbers = numbers.contiguous()
        comm.reduce(numbers, group, PURPOSE, step)
        size = MatrixBlock(name, layout, (), numbers).size
        self.told.append(f"{name} of panel {step} ({size}) is summed over {group.axis} on rank {group.ranks[step]}")
        return numbers if group.index == step else so_far

    def _block(
        self,
        name: str,
        layout: Layout,
        numbers: Tensor | None = None,
        coordinate: Mapping[str, int] | None = None,
    ) -> MatrixBlock:
        """The block of the matrix called `name` (d for gradients) at a coordinate, this rank's by default."""
        matrix = self._matrices[name.removeprefix("d")]
        ranges = layout.ranges(tuple(matrix.shape), self._shape.sizes, coordinate or self._mesh.coordinate)
        return MatrixBlock(name, layout, ranges, matrix.new_empty(0) if numbers is None else numbers.contiguous())

    def _gather(self, block: MatrixBlock, dim: int, axis: str) -> MatrixBlock:
        group, numbers = self._mesh.group(axis), block.numbers
        if group.size > 1:
            coordinates = ({**self._mesh.coordinate, axis: index} for index in range(group.size))
            ranges = [self._block(block.name, block.layout, coordinate=one).ranges[dim] for one in coordinates]
            lengths = [stop - start for start, stop in ranges]
            padded = _pad(numbers, dim, max(lengths))
            parts = comm.all_gather(padded, group, PURPOSE, dim).split(max(lengths), dim)
            numbers = torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths)], dim)
        dims = list(block.layout.dims)
        dims[dim] = dims[dim][:-1]
        gathered = self._block(block.name, Layout(tuple(dims)), numbers)
        if group.size > 1:
            self.told.append(f"all-gather of {block.name} ({gathered.size}) {_over(group)}")
        return gathered

    def _scatter(self, block: MatrixBlock, dim: int, axis: str) -> MatrixBlock:
        group, numbers = self._mesh.group(axis), block.numbers
        if group.size > 1:
            cuts = [chunk_range(numbers.size(dim), group.size, index) for index in range(group.size)]
            largest = max(stop - start for start, stop in cuts)
            padded = torch.cat([_pad(numbers.narrow(dim, a, b - a), dim, largest) for a, b in cuts], dim)
            start, stop = cuts[group.index]
            numbers = comm.reduce_scatter(padded, group, PURPOSE, dim).narrow(dim, 0, stop - start)
            self.told.append(f"reduce-scatter of the partial {block.name} ({block.size}) {_over(group)}")
        return self._block(block.name, Layout(block.layout.dims).split(dim, axis), numbers)

    def _sum(self, block: MatrixBlock, axis: str) -> None:
        group = self._mesh.group(axis)
        if group.size > 1:
            comm.all_reduce(block.numbers, group, PURPOSE)
            self.told.append(f"all-reduce of the partial {block.name} ({block.size}) {_over(group)}")


def _layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, activation.features))


def _pad(numbers: Tensor, dim: int, length: int) -> Tensor:
    shape = list(numbers.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([numbers, numbers.new_zeros(shape)], dim).contiguous()


def _over(group: Group) -> str:
    return f"over {group.axis}, with ranks {list(group.ranks)}"


def show(*blocks: MatrixBlock, note: str = "") -> list[str]:
    """Lines that show blocks next to each other: name, rows and columns, numbers. note: after the last one's name."""
    pictures = [_picture(block, note if block is blocks[-1] else "") for block in blocks]
    height = max(len(picture) for picture in pictures)
    columns = [[*picture, *[""] * (height - len(picture))] for picture in pictures]
    widths = [max(map(len, column)) for column in columns]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in zip(*columns)]


def _picture(block: MatrixBlock, note: str) -> list[str]:
    numbers = (block.numbers.T if block.is_weight else block.numbers).tolist()
    name = block.name + note
    if not block.numbers.numel():
        return [f"{name}: nothing", "(more ranks than parts)"]
    width = max(len(f"{number:g}") for row in numbers for number in row)
    rows = (" ".join(f"{number:g}".rjust(width) for number in row) for row in numbers)
    return [name + block.title.removeprefix(block.name), *rows]
