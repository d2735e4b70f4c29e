"""Blocks of the lesson's matrices on one rank, and the collectives of a product on them, each described in a line.

Blocks may be uneven or empty, so they are padded to the largest before they are gathered or scattered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from parallelrun.base.layout import Layout, chunk_range
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.model.product import ActivationLayout, Move, Product

PURPOSE = "lesson"
ROWS, COLUMNS = 0, 1  # dims
DIMS = {"rows": ROWS, "features": COLUMNS}


@dataclass(frozen=True)
class MatrixBlock:
    """A named block of a matrix on this rank: its Layout, its ranges in the full matrix, its numbers."""

    name: str
    layout: Layout
    ranges: tuple[tuple[int, int], ...]
    numbers: Tensor

    def part_of(self, matrix: Tensor) -> Tensor:
        """The same block of another matrix of that shape."""
        return matrix[tuple(slice(*pair) for pair in self.ranges)]

    @property
    def title(self) -> str:
        """`X[0:2, 0:5]`."""
        return f"{self.name}[{', '.join(f'{start}:{stop}' for start, stop in self.ranges)}]"


class BlockOperations:
    """The collectives of one product over the mesh.

    matrices: the full "X" (rows, inner), "W" (inner, columns) and "Y" (rows, columns), whose shapes their gradients
    have. told: a line for each collective.
    """

    def __init__(self, product: Product, matrices: Mapping[str, Tensor], mesh: Mesh):
        self.product, self._matrices, self._mesh = product, matrices, mesh
        self._layouts = {"X": _layout(product.x), "W": _transposed(product.weight), "Y": _layout(product.y)}
        self.num_panels = mesh.shape.size(product.x.features[0]) if product.panels else 0
        self.told: list[str] = []

    def take_told(self, prefix: str) -> list[str]:
        lines, self.told = [f"{prefix}: {line}" for line in self.told], []
        return lines

    def held(self, name: str) -> MatrixBlock:
        """The block of X, W or dY that this rank has before anything is sent."""
        matrix = name.removeprefix("d")
        block = self._block(name, self._layouts[matrix])
        return self._block(name, block.layout, block.part_of(self._matrices[matrix]))

    def computed(self, name: str, layout: ActivationLayout, numbers: Tensor) -> MatrixBlock:
        """Numbers just computed, as a block of an activation."""
        return self._block(name, _layout(layout), numbers)

    def gather(self, block: MatrixBlock, move: Move | None) -> MatrixBlock:
        """All-gather of an activation along a dim."""
        return block if move is None else self._gather(block, DIMS[move.dim], move.axis)

    def gather_weight(self, block: MatrixBlock) -> MatrixBlock:
        """All-gather of the columns of W over each axis, minor-most first."""
        for axis in self.product.gather_w:
            block = self._gather(block, COLUMNS, axis)
        return block

    def reduce(self, block: MatrixBlock, move: Move | None, sum_axis: str | None) -> MatrixBlock:
        """Reduce-scatter along `move`, or all-reduce over `sum_axis`, or neither."""
        if sum_axis:
            self._sum(block, sum_axis)
        return block if move is None else self._scatter(block, DIMS[move.dim], move.axis)

    def weight_gradient(self, numbers: Tensor) -> MatrixBlock:
        """dW from its partial sums: reduce-scattered where W was gathered, all-reduced over the copies of W."""
        block = self._block("dW", _transposed(self.product.gathered_weight), numbers)
        for axis in reversed(self.product.gather_w):
            block = self._scatter(block, COLUMNS, axis)
        for axis in self.product.partial_weight:
            self._sum(block, axis)
        return block

    def panel(self, block: MatrixBlock, dim: int, step: int) -> MatrixBlock:
        """SUMMA: the panel `step` of the inner dim, `dim` of the block, broadcast by the rank that has it."""
        (axis,) = block.layout.dims[dim]
        group = self._mesh.group(axis)
        owner = self._block(block.name, block.layout, coordinate={axis: step})
        shape = tuple(stop - start for start, stop in owner.ranges)
        numbers = block.numbers.clone() if group.index == step else block.numbers.new_empty(shape)
        comm.broadcast(numbers, group, PURPOSE, step)
        self.told.append(f"{owner.title} comes from rank {group.ranks[step]} over {axis}")
        return MatrixBlock(block.name, block.layout, owner.ranges, numbers)

    def reduce_panel(self, name: str, dim: int, step: int, numbers: Tensor, so_far: Tensor) -> Tensor:
        """Sum partial gradients of panel `step` on the rank that has it; returns this rank's gradient so far."""
        (axis,) = self._layouts[name[1:]].dims[dim]
        group, numbers = self._mesh.group(axis), numbers.contiguous()
        comm.reduce(numbers, group, PURPOSE, step)
        self.told.append(f"{name} of panel {step} ({_size(numbers)}) is summed over {axis} on rank {group.ranks[step]}")
        return numbers if group.index == step else so_far

    def _block(
        self, name: str, layout: Layout, numbers: Tensor | None = None, coordinate: Mapping[str, int] | None = None
    ) -> MatrixBlock:
        """The block of the matrix called `name` (d for gradients) here, or where `coordinate` differs from here."""
        matrix, here = self._matrices[name.removeprefix("d")], self._mesh.coordinate
        ranges = layout.ranges(tuple(matrix.shape), self._mesh.shape.sizes, {**here, **(coordinate or {})})
        return MatrixBlock(name, layout, ranges, matrix.new_empty(0) if numbers is None else numbers.contiguous())

    def _gather(self, block: MatrixBlock, dim: int, axis: str) -> MatrixBlock:
        group, numbers = self._mesh.group(axis), block.numbers
        if group.size > 1:
            members = (self._block(block.name, block.layout, coordinate={axis: index}) for index in range(group.size))
            lengths = [stop - start for start, stop in (member.ranges[dim] for member in members)]
            padded = _pad(numbers, dim, max(lengths))
            parts = comm.all_gather(padded, group, PURPOSE, dim).split(max(lengths), dim)
            numbers = torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths)], dim)
            self.told.append(f"all-gather of {block.name} ({_size(numbers)}) {_over(group)}")
        dims = list(block.layout.dims)
        dims[dim] = dims[dim][:-1]
        return self._block(block.name, Layout(tuple(dims)), numbers)

    def _scatter(self, block: MatrixBlock, dim: int, axis: str) -> MatrixBlock:
        group, numbers = self._mesh.group(axis), block.numbers
        if group.size > 1:
            cuts = [chunk_range(numbers.size(dim), group.size, index) for index in range(group.size)]
            largest = max(stop - start for start, stop in cuts)
            padded = torch.cat([_pad(numbers.narrow(dim, a, b - a), dim, largest) for a, b in cuts], dim)
            start, stop = cuts[group.index]
            numbers = comm.reduce_scatter(padded, group, PURPOSE, dim).narrow(dim, 0, stop - start)
            self.told.append(f"reduce-scatter of the partial {block.name} ({_size(block.numbers)}) {_over(group)}")
        return self._block(block.name, Layout(block.layout.dims).split(dim, axis), numbers)

    def _sum(self, block: MatrixBlock, axis: str) -> None:
        group = self._mesh.group(axis)
        if group.size > 1:
            comm.all_reduce(block.numbers, group, PURPOSE)
            self.told.append(f"all-reduce of the partial {block.name} ({_size(block.numbers)}) {_over(group)}")


def _layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, activation.features))


def _transposed(weight: Layout) -> Layout:
    """The layout of W as (inner, columns); parameters are stored as (columns, inner)."""
    return Layout(weight.dims[::-1])


def _pad(numbers: Tensor, dim: int, length: int) -> Tensor:
    shape = list(numbers.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([numbers, numbers.new_zeros(shape)], dim).contiguous()


def _size(numbers: Tensor) -> str:
    """`4x8 = 32 numbers`."""
    rows, columns = numbers.shape
    return f"{rows}x{columns} = {numbers.numel()} numbers"


def _over(group: Group) -> str:
    return f"over {group.axis}, with ranks {list(group.ranks)}"


def picture(*blocks: MatrixBlock, note: str = "") -> list[str]:
    """Lines that show blocks next to each other: name, rows and columns, numbers. note: after the last one's name."""
    columns = [_lines(block, note if block is blocks[-1] else "") for block in blocks]
    widths = [max(map(len, column)) for column in columns]
    rows = zip_longest(*columns, fillvalue="")
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _lines(block: MatrixBlock, note: str) -> list[str]:
    name = block.name + note
    if not block.numbers.numel():
        return [f"{name}: nothing", "(more ranks than parts)"]
    cells = [[f"{number:g}" for number in row] for row in block.numbers.tolist()]
    width = max(len(cell) for row in cells for cell in row)
    rows = (" ".join(cell.rjust(width) for cell in row) for row in cells)
    return [name + block.title.removeprefix(block.name), *rows]
