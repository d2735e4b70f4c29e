"""What one Product moves on this rank: gathers and scatters of activations and of packed weights, each in flight
until its result is asked for.

Activations are handled as matrices (rows = samples x positions, features); several outputs of one layer travel in one
buffer, and so do their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product as coordinates
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun import comm
from parallelrun.layout import Layout
from parallelrun.mesh import Group, Mesh
from parallelrun.product import Move, Product

from .block_matrix import BlockMatrix

ACTIVATIONS, WEIGHTS, WEIGHT_GRADIENTS = "activations", "weights", "weight_gradients"

Finish = Callable[[], Tensor]


class MoveGroup(NamedTuple):
    """Over which group, and along which dim of the matrix (0 rows, 1 features), an activation is gathered or scattered.
    None: it stays where it is."""

    dim: int
    group: Group | None

    @property
    def size(self) -> int:
        return self.group.size if self.group else 1


def move_group(move: Move | None, mesh: Mesh) -> MoveGroup:
    """A Product's move on this rank."""
    if move is None:
        return MoveGroup(0, None)
    group = mesh.group(move.axis)
    return MoveGroup(0 if move.dim == "rows" else 1, group if group.size > 1 else None)


def start_gather(part: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to gather equal parts (...); the function returned waits and gives (size, ...)."""
    if group is None:
        return lambda: part.unsqueeze(0)
    whole = part.new_empty((group.size, *part.shape))
    part = part.contiguous()
    work = comm.all_gather_into(whole.flatten(0, 1), part, group, purpose, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return whole

    return finish


def start_scatter(parts: Tensor, group: Group | None, purpose: str) -> Finish:
    """Begin to sum contiguous `parts` (size, ...) over the group; the function returned gives this rank's (...)."""
    if group is None:
        return lambda: parts[0]
    mine = parts.new_empty(parts.shape[1:])
    work = comm.reduce_scatter_into(mine, parts.flatten(0, 1), group, purpose, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine

    return finish


@dataclass(frozen=True)
class ActivationPacking:
    """Several matrices of the same rows that are gathered, or whose partial sums are scattered, in one buffer.

    rows, widths: of the whole matrices on this rank, gathered or before they are scattered. inner: dims of the
    activations between samples and features, which rows hold flat. sent: widths as they travel, padded to those of the
    rank that has most (an uneven vocabulary).
    """

    strategy: MoveGroup
    rows: int
    inner: tuple[int, ...]
    widths: tuple[int, ...]
    sent: tuple[int, ...]

    @property
    def is_padded(self) -> bool:
        return self.sent != self.widths

    def read(self, buffer: Tensor) -> list[BlockMatrix]:
        """The whole matrices in `buffer` (parts, ...): views."""
        if len(self.sent) == 1 and self.strategy.dim == 0 and not self.is_padded:
            return [BlockMatrix((buffer.view(self.rows, self.sent[0]),))]
        found, start, size = [], 0, self.strategy.size
        for width, sent in zip(self.widths, self.sent):
            shape = (self.rows // size, sent) if self.strategy.dim == 0 else (self.rows, sent // size)
            length = shape[0] * shape[1]
            parts = (part.narrow(0, start, length).view(shape) for part in buffer.view(size, -1).unbind(0))
            found.append(
                BlockMatrix(tuple(part if sent == width else part[:, :width] for part in parts), self.strategy.dim)
            )
            start += length
        return found

    def new(self, like: Tensor) -> tuple[Tensor, list[BlockMatrix]]:
        """(buffer to be scattered, the whole matrices to be written in it)."""
        buffer = (like.new_zeros if self.is_padded else like.new_empty)((self.strategy.size, self._part_length))
        return buffer, self.read(buffer)

    def start_scatter(self, buffer: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to sum what `new` gave; the function returned gives this rank's part of every activation."""
        scattering = start_scatter(buffer, self.strategy.group, ACTIVATIONS)
        size = self.strategy.size
        if self.strategy.dim == 0:
            own = replace(self, strategy=MoveGroup(0, None), rows=self.rows // size)
        else:
            widths = tuple(width // size for width in self.widths)
            own = replace(self, strategy=MoveGroup(0, None), widths=widths, sent=widths)
        return lambda: tuple(self.shaped(matrix.parts[0]) for matrix in own.read(scattering()))

    def start_gather(self, parts: Sequence[Tensor]) -> Finish:
        """Begin to gather this rank's part of every activation; the function returned gives what `read` reads."""
        if self.is_padded:
            parts = [functional.pad(part, (0, sent - part.size(-1))) for part, sent in zip(parts, self.sent)]
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return start_gather(flat, self.strategy.group, ACTIVATIONS)

    def shaped(self, matrix: Tensor) -> Tensor:
        """The activation in a matrix. No view as autograd sees it: outputs of nodes may be changed in place."""
        return matrix.view(-1, *self.inner, matrix.size(1)).detach()

    @property
    def _part_length(self) -> int:
        if self.strategy.dim == 0:
            assert self.rows % self.strategy.size == 0, f"{self.rows} rows do not split by {self.strategy.size}"
            return self.rows // self.strategy.size * sum(self.sent)
        assert not any(width % self.strategy.size for width in self.sent), (
            f"{self.sent} do not split by {self.strategy.size}"
        )
        assert not self.is_padded, "features that are scattered divide"
        return self.rows * sum(self.sent) // self.strategy.size


def input_packing(x: Tensor, strategy: MoveGroup) -> ActivationPacking:
    """X, of which this rank has `x` (samples, ..., features): it is gathered along `way`, its gradient scattered."""
    rows, width = x.numel() // x.size(-1), x.size(-1)
    width = width * strategy.size if strategy.dim else width
    return ActivationPacking(
        strategy, rows if strategy.dim else rows * strategy.size, tuple(x.shape[1:-1]), (width,), (width,)
    )


@dataclass(frozen=True)
class WeightPacking:
    """How the local rows of several weights lie one after the other in one buffer, and what of it is real.

    groups: over which W is gathered, minor-most axis first; none where it is multiplied as it is stored. rows: of each
    weight, padded to the largest part. valid: of each weight, the real rows of every gathered part, in order.
    widths: of each output, the features of the rank that has most.
    """

    groups: tuple[Group, ...]
    rows: tuple[int, ...]
    valid: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return prod(group.size for group in self.groups)

    @property
    def is_padded(self) -> bool:
        return any(real != rows for rows, valid in zip(self.rows, self.valid) for real in valid)

    def pack(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """(sum of rows, columns): this rank's rows of every weight, rounded to `dtype`."""
        if len(weights) == 1 and weights[0].size(0) == self.rows[0]:
            return weights[0].to(dtype)
        out = weights[0].new_empty((sum(self.rows), *weights[0].shape[1:]), dtype=dtype)
        for weight, place in zip(weights, out.split(self.rows)):
            place[: weight.size(0)].copy_(weight)
            place[weight.size(0) :].zero_()
        return out

    def matrices(self, buffer: Tensor) -> list[BlockMatrix]:
        """The gathered weights in `buffer` (parts, sum of rows, columns): views, without what is padded."""
        if len(self.rows) == 1 and not self.is_padded:
            return [BlockMatrix((buffer.flatten(0, 1),))]
        found, start = [], 0
        for rows, valid in zip(self.rows, self.valid):
            parts = [buffer[index].narrow(0, start, real) for index, real in enumerate(valid) if real]
            found.append(BlockMatrix(tuple(parts or [buffer[0].narrow(0, start, 0)])))
            start += rows
        return found

    def start_gather(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Finish:
        """Begin to gather the weights, rounded to `dtype`; gives the buffer that `matrices` reads."""
        inner = start_gather(self.pack(weights, dtype), next(iter(self.groups), None), WEIGHTS)

        def finish() -> Tensor:
            buffer = inner()
            for group in self.groups[1:]:
                buffer = start_gather(buffer.flatten(0, 1), group, WEIGHTS)()
            return buffer.view(self.num_parts, sum(self.rows), -1)

        return finish

    def start_scatter(self, buffer: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to sum gradients that lie as `matrices` does; gives those of this rank's padded rows of each."""
        last = self.groups[-1] if self.groups else None
        outer = start_scatter(self._by_group(buffer, last), last, WEIGHT_GRADIENTS)

        def finish() -> list[Tensor]:
            mine = outer()
            for group in reversed(self.groups[:-1]):
                mine = start_scatter(self._by_group(mine, group), group, WEIGHT_GRADIENTS)()
            return list(mine.view(sum(self.rows), -1).split(self.rows))

        return finish

    def _by_group(self, buffer: Tensor, group: Group | None) -> Tensor:
        return buffer.view(group.size if group else 1, -1, buffer.size(-1))


def weight_packing(
    product: Product, mesh: Mesh, weights: Sequence[Tensor], out_features: Sequence[int] | None = None
) -> WeightPacking:
    """How `weights` are packed. out_features: the global length of dim 0 of each; None: every part is as large as this
    rank's (true of whatever divides: all but a vocabulary)."""
    groups = tuple(group for axis in product.gather_w if (group := mesh.group(axis)).size > 1)
    num_parts = prod(group.size for group in groups)
    first, sizes = product.weight.dims[0], mesh.shape.sizes
    strategies = prod(sizes.get(axis, 1) for axis in first)
    if out_features is None or not any(length % strategies for length in out_features):
        rows = tuple(weight.size(0) for weight in weights)
        return WeightPacking(
            groups, rows, tuple((own,) * num_parts for own in rows), tuple(own * num_parts for own in rows)
        )
    layout, outer = Layout((first,)), tuple(reversed(groups))
    places = [
        {**mesh.coordinate, **{group.axis: index for group, index in zip(outer, place)}}
        for place in coordinates(*(range(group.size) for group in outer))
    ]
    valid = tuple(tuple(layout.local_numel((length,), sizes, place) for place in places) for length in out_features)
    largest = tuple(layout.local_numel((length,), sizes, {}) for length in out_features)
    whole = Layout(product.gathered_weight.dims[:1])
    return WeightPacking(
        groups, largest, valid, tuple(whole.local_numel((length,), sizes, {}) for length in out_features)
    )


def output_packing(
    strategy: MoveGroup, source: ActivationPacking, widths: Sequence[int], packed: WeightPacking
) -> ActivationPacking:
    """Every Y of an X: scattered along `way`, and its gradient gathered."""
    return ActivationPacking(
        strategy, source.rows, source.inner, tuple(widths), packed.widths if strategy.group else tuple(widths)
    )
