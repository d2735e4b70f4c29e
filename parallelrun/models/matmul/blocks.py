"""Blocks of the lesson's matrices on one rank, and the moves of a product on them, each told in a line.

Parts may be uneven or empty, so what is gathered or dealt out is padded to the largest part on the way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallelrun import comm
from parallelrun.layout import Layout, chunk_range
from parallelrun.mesh import Group, Mesh
from parallelrun.models.matmul.cuts import side_by_side
from parallelrun.plan.mesh_shape import MeshShape
from parallelrun.product import Activation, Move, Product

PURPOSE = "lesson"
DIMS = {"rows": 0, "features": 1}


@dataclass(frozen=True)
class Block:
    """A named part of a matrix on this rank: how it lies, its ranges in the whole, its numbers.

    W and dW are (columns, inner), as parameters are stored; they are shown as in Y = X W.
    """

    name: str
    layout: Layout
    ranges: tuple[tuple[int, int], ...]
    numbers: Tensor

    def part_of(self, whole: Tensor) -> Tensor:
        """The same part of another matrix of that shape."""
        return whole[tuple(slice(*pair) for pair in self.ranges)]

    @property
    def is_weight(self) -> bool:
        return self.name.endswith("W")


class Matrices:
    """X, W and dY of one product, cut over the mesh. `whole`: "X", "W" (columns, inner), "Y" (its gradient)."""

    def __init__(self, product: Product, whole: dict[str, Tensor], shape: MeshShape, mesh: Mesh):
        self.product, self._whole, self._shape, self._mesh = product, whole, shape, mesh
        self._lies = {"X": as_layout(product.x), "W": product.weight, "Y": as_layout(product.y)}
        self.num_panels = shape.size(product.x.features[0]) if product.panels else 0

    def held(self, name: str, called: str = "") -> Block:
        """The part of X, W or Y (= dY) that this rank has before anything moves."""
        block = self._block(called or name, self._lies[name])
        return Block(block.name, block.layout, block.ranges, block.part_of(self._whole[name]).contiguous())

    def named(self, name: str, lies: Activation, numbers: Tensor) -> Block:
        """Numbers just computed, as the part of an activation that they are."""
        block = self._block(name, as_layout(lies))
        return Block(name, block.layout, block.ranges, numbers)

    def gather(self, block: Block, move: Move | None, told: list[str]) -> Block:
        """All-gather along a dim of an activation."""
        return block if move is None else self._gather(block, DIMS[move.dim], move.axis, told)

    def gather_rows(self, block: Block, axes: tuple[str, ...], told: list[str]) -> Block:
        """All-gather W along its dim 0 over each axis, minor-most first."""
        for axis in axes:
            block = self._gather(block, 0, axis, told)
        return block

    def scatter(self, block: Block, move: Move | None, sum_axis: str | None, told: list[str]) -> Block:
        """Reduce-scatter along `move`, or all-reduce over `sum_axis`, or neither."""
        if sum_axis:
            self._sum(block, sum_axis, told)
        return block if move is None else self._scatter(block, DIMS[move.dim], move.axis, told)

    def weight_gradient(self, numbers: Tensor, told: list[str]) -> Block:
        """dW from its partial sums over the gathered rows: dealt out where W was gathered, summed over copies."""
        block = self._block("dW", self.product.gathered_weight)
        block = Block("dW", block.layout, block.ranges, numbers)
        for axis in reversed(self.product.gather_w):
            block = self._scatter(block, 0, axis, told)
        for axis in self.product.partial_weight:
            self._sum(block, axis, told)
        return block

    def panel(self, block: Block, step: int, told: list[str]) -> Block:
        """SUMMA: the block of the inner dim's panel `step`, broadcast by the rank of this row (column) that has it."""
        axis = block.layout.dims[1][0]
        group, place = self._mesh.group(axis), self._mesh.coordinate
        owner = self._block(block.name, block.layout, {**place, axis: step})
        numbers = block.numbers.clone() if group.index == step else block.numbers.new_empty(_shape(owner))
        comm.broadcast(numbers, group, PURPOSE, step)
        told.append(f"{_title(owner)} comes from rank {group.ranks[step]} over {axis}")
        return Block(block.name, block.layout, owner.ranges, numbers)

    def reduce_panel(self, name: str, numbers: Tensor, step: int, mine: Tensor, told: list[str]) -> Tensor:
        """Sum partial gradients of panel `step` on the rank that has it; returns this rank's block so far."""
        layout = self._lies[name[1:]]
        group = self._mesh.group(layout.dims[1][0])
        numbers = numbers.contiguous()
        comm.reduce(numbers, group, PURPOSE, step)
        size = _size(numbers, turned=name == "dW")
        told.append(f"{name} of panel {step} ({size}) is summed over {group.axis} on rank {group.ranks[step]}")
        return numbers if group.index == step else mine

    def sum_copies(self, numbers: Tensor, told: list[str]) -> Block:
        """dW summed over the axes that hold copies of W."""
        block = self._block("dW", self.product.weight)
        block = Block("dW", block.layout, block.ranges, numbers)
        for axis in self.product.partial_weight:
            self._sum(block, axis, told)
        return block

    def show(self, *blocks: Block, note: str = "") -> list[str]:
        """The blocks' numbers next to each other; `note` behind the name of the last one."""
        pictures = {}
        for number, block in enumerate(blocks, start=1):
            name = block.name + (note if number == len(blocks) else "")
            turned = block.is_weight
            ranges = tuple(reversed(block.ranges)) if turned else block.ranges
            pictures[name] = (ranges, (block.numbers.T if turned else block.numbers).tolist())
        return side_by_side(pictures)

    def _block(self, name: str, layout: Layout, coordinate: dict[str, int] | None = None) -> Block:
        """A block without numbers: the part of the matrix called `name` (d for gradients) at a coordinate."""
        whole = self._whole[name.removeprefix("d")]
        ranges = layout.ranges(tuple(whole.shape), self._shape.sizes, coordinate or self._mesh.coordinate)
        return Block(name, layout, ranges, whole.new_empty(0))

    def _gather(self, block: Block, dim: int, axis: str, told: list[str]) -> Block:
        group = self._mesh.group(axis)
        if group.size == 1:
            return self._after(block, dim, axis, block.numbers, gathered=True)
        lengths = self._lengths(block, dim, axis)
        padded = _pad(block.numbers, dim, max(lengths))
        parts = comm.all_gather(padded, group, PURPOSE, dim).split(max(lengths), dim)
        joined = torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths)], dim)
        told.append(f"all-gather of {block.name} ({_size(joined, block.is_weight)}) {_with(group)}")
        return self._after(block, dim, axis, joined, gathered=True)

    def _scatter(self, block: Block, dim: int, axis: str, told: list[str]) -> Block:
        group = self._mesh.group(axis)
        if group.size == 1:
            return self._after(block, dim, axis, block.numbers, gathered=False)
        length = block.numbers.size(dim)
        cuts = [chunk_range(length, group.size, index) for index in range(group.size)]
        largest = max(stop - start for start, stop in cuts)
        padded = torch.cat([_pad(block.numbers.narrow(dim, a, b - a), dim, largest) for a, b in cuts], dim)
        mine = comm.reduce_scatter(padded, group, PURPOSE, dim)
        start, stop = cuts[group.index]
        told.append(
            f"reduce-scatter of the partial {block.name} ({_size(block.numbers, block.is_weight)}) {_with(group)}"
        )
        return self._after(block, dim, axis, mine.narrow(dim, 0, stop - start), gathered=False)

    def _sum(self, block: Block, axis: str, told: list[str]) -> None:
        group = self._mesh.group(axis)
        if group.size > 1:
            comm.all_reduce(block.numbers, group, PURPOSE)
            told.append(
                f"all-reduce of the partial {block.name} ({_size(block.numbers, block.is_weight)}) {_with(group)}"
            )

    def _after(self, block: Block, dim: int, axis: str, numbers: Tensor, gathered: bool) -> Block:
        dims = list(block.layout.dims)
        dims[dim] = dims[dim][:-1] if gathered else (*dims[dim], axis)
        moved = self._block(block.name, Layout(tuple(dims)))
        return Block(block.name, moved.layout, moved.ranges, numbers.contiguous())

    def _lengths(self, block: Block, dim: int, axis: str) -> list[int]:
        """How long the part of each member of the group is."""
        coordinate = self._mesh.coordinate
        found = [
            self._block(block.name, block.layout, {**coordinate, axis: index}).ranges[dim]
            for index in range(self._mesh.group(axis).size)
        ]
        return [stop - start for start, stop in found]


def as_layout(lies: Activation) -> Layout:
    """The Layout of a matrix that lies like that activation."""
    return Layout((lies.rows, lies.features))


def _pad(numbers: Tensor, dim: int, length: int) -> Tensor:
    shape = list(numbers.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([numbers, numbers.new_zeros(shape)], dim).contiguous()


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in block.ranges)


def _title(block: Block) -> str:
    (top, bottom), (left, right) = tuple(reversed(block.ranges)) if block.is_weight else block.ranges
    return f"{block.name}[{top}:{bottom}, {left}:{right}]"


def _size(numbers: Tensor, turned: bool = False) -> str:
    rows, columns = reversed(numbers.shape) if turned else numbers.shape
    return f"{rows}x{columns} = {numbers.numel()} numbers"


def _with(group: Group) -> str:
    return f"over {group.axis}, with ranks {list(group.ranks)}"
