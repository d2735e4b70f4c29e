"""Blocks of the lesson's matrices on one rank, and the collectives of a product on them, each described in a line.

Blocks may be uneven or empty, so a gather is a broadcast of each rank's block, and a scatter a reduction to each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
Moves = Iterable[tuple[int, str]]  # (dim, axis) of gathers or scatters


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

    @property
    def size(self) -> str:
        """`4x8 = 32 numbers`."""
        rows, columns = self.numbers.shape
        return f"{rows}x{columns} = {self.numbers.numel()} numbers"


class BlockOperations:
    """The collectives of one product over the mesh.

    matrices: the full "X" (rows, inner), "W" (inner, columns) and "Y" (rows, columns), whose shapes their gradients
    have. messages: a line for each collective.
    """

    def __init__(self, product: Product, matrices: Mapping[str, Tensor], mesh: Mesh):
        self.product, self._matrices, self._mesh = product, matrices, mesh
        self._layouts = {"X": as_layout(product.x), "W": transposed(product.weight), "Y": as_layout(product.y)}
        self.num_panels = mesh.shape.size(product.x.features[0]) if product.panels else 0
        self.messages: list[str] = []

    def take_messages(self, prefix: str) -> list[str]:
        lines, self.messages = [f"{prefix}: {line}" for line in self.messages], []
        return lines

    def stored(self, name: str) -> MatrixBlock:
        """The block of X, W or dY that this rank has before anything is sent."""
        layout, matrix = self._layouts[name.removeprefix("d")], self._matrices[name.removeprefix("d")]
        return self.block(name, layout, matrix[tuple(slice(*pair) for pair in self._ranges(name, layout, {}))])

    def block(self, name: str, layout: Layout, numbers: Tensor) -> MatrixBlock:
        """Numbers of this rank as a block of the matrix called `name` (d for gradients)."""
        return MatrixBlock(name, layout, self._ranges(name, layout, {}), numbers.contiguous())

    def gather(self, block: MatrixBlock, moves: Moves) -> MatrixBlock:
        """All-gather over each axis along its dim, minor-most first."""
        for dim, axis in moves:
            group, numbers = self._mesh.group(axis), block.numbers
            if group.size > 1:
                numbers = torch.cat([self._received(block, axis, index).numbers for index in range(group.size)], dim)
            dims = list(block.layout.dims)
            dims[dim] = dims[dim][:-1]
            block = self.block(block.name, Layout(tuple(dims)), numbers)
            self._tell("all-gather of", block, group)
        return block

    def reduce(self, block: MatrixBlock, scatters: Moves, sums: Iterable[str | None]) -> MatrixBlock:
        """Reduce-scatter partial sums over each axis along its dim, then all-reduce them over the axes `sums`."""
        for dim, axis in scatters:
            group, numbers = self._mesh.group(axis), block.numbers
            if group.size > 1:
                self._tell("reduce-scatter of the partial", block, group)
                cuts = [chunk_range(numbers.size(dim), group.size, index) for index in range(group.size)]
                parts = [numbers.narrow(dim, start, stop - start).contiguous() for start, stop in cuts]
                for index, part in enumerate(parts):
                    comm.reduce(part, group, PURPOSE, index)
                numbers = parts[group.index]
            block = self.block(block.name, Layout(block.layout.dims).split(dim, axis), numbers)
        for group in (self._mesh.group(axis) for axis in sums if axis):
            if group.size > 1:
                comm.all_reduce(block.numbers, group, PURPOSE)
            self._tell("all-reduce of the partial", block, group)
        return block

    def panel(self, block: MatrixBlock, dim: int, step: int) -> MatrixBlock:
        """SUMMA: the panel `step` of the inner dim, `dim` of the block, broadcast by the rank that has it."""
        (axis,) = block.layout.dims[dim]
        panel = self._received(block, axis, step)
        self.messages.append(f"{panel.title} comes from rank {self._mesh.group(axis).ranks[step]} over {axis}")
        return panel

    def reduce_panel(self, name: str, dim: int, step: int, numbers: Tensor, so_far: Tensor) -> Tensor:
        """Sum partial gradients of panel `step` on the rank that has it; returns this rank's gradient so far."""
        (axis,) = self._layouts[name[1:]].dims[dim]
        group, numbers = self._mesh.group(axis), numbers.contiguous()
        comm.reduce(numbers, group, PURPOSE, step)
        size = f"{numbers.size(0)}x{numbers.size(1)} = {numbers.numel()} numbers"
        self.messages.append(f"{name} of panel {step} ({size}) is summed over {axis} on rank {group.ranks[step]}")
        return numbers if group.index == step else so_far

    def _received(self, block: MatrixBlock, axis: str, index: int) -> MatrixBlock:
        """The block that rank `index` of an axis has, broadcast by it."""
        group, ranges = self._mesh.group(axis), self._ranges(block.name, block.layout, {axis: index})
        shape = tuple(stop - start for start, stop in ranges)
        numbers = block.numbers.clone() if group.index == index else block.numbers.new_empty(shape)
        comm.broadcast(numbers, group, PURPOSE, index)
        return MatrixBlock(block.name, block.layout, ranges, numbers)

    def _ranges(self, name: str, layout: Layout, elsewhere: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """The ranges of a matrix here, or where the coordinate differs from here."""
        shape = tuple(self._matrices[name.removeprefix("d")].shape)
        return layout.ranges(shape, self._mesh.shape.sizes, {**self._mesh.coordinate, **elsewhere})

    def _tell(self, operation: str, block: MatrixBlock, group: Group) -> None:
        if group.size > 1:
            over = f"over {group.axis}, with ranks {list(group.ranks)}"
            self.messages.append(f"{operation} {block.name} ({block.size}) {over}")


def as_layout(activation: ActivationLayout) -> Layout:
    return Layout((activation.rows, activation.features))


def transposed(weight: Layout) -> Layout:
    """The layout of W as (inner, columns); parameters are stored as (columns, inner)."""
    return Layout(weight.dims[::-1])


def moves_of(move: Move | None) -> Moves:
    return [] if move is None else [(ROWS if move.dim == "rows" else COLUMNS, move.axis)]


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
