"""The buffers that a product sends: activations and weights packed for gathers and scatters.

Activations are handled as matrices (rows = samples x positions, features). Several outputs of one layer share a buffer,
and so do their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product as coordinates
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.planner.model.product import Move, Product

from ..common.transfers import Finish, start_all_gather, start_reduce_scatter
from .block_matrix import BlockMatrix

ACTIVATIONS, WEIGHTS, WEIGHT_GRADIENTS = "activations", "weights", "weight_gradients"


class MoveGroup(NamedTuple):
    """The dim of the matrix (0 rows, 1 features) along which an activation is gathered or scattered, and the group;
    None: it is not moved."""

    dim: int
    group: Group | None

    @property
    def size(self) -> int:
        return self.group.size if self.group else 1


STAYS = MoveGroup(0, None)


def move_group(move: Move | None, mesh: Mesh) -> MoveGroup:
    """Return a Product's move on this rank."""
    if move is None:
        return STAYS
    group = mesh.group(move.axis)
    return MoveGroup(0 if move.dim == "rows" else 1, group if group.size > 1 else None)


@dataclass(frozen=True)
class ActivationPacking:
    """How several matrices of the same rows share the buffer that is gathered, or whose partial sums are scattered.

    rows, widths: of the whole matrices on this rank: after the gather, before the scatter. inner: dims of the
    activations between samples and features, which rows hold flat. sent: widths in the buffer, padded to those of the
    rank that has most (an uneven vocabulary).
    """

    move: MoveGroup
    rows: int
    inner: tuple[int, ...]
    widths: tuple[int, ...]
    sent: tuple[int, ...]

    @cached_property
    def is_padded(self) -> bool:
        return self.sent != self.widths

    @cached_property
    def part(self) -> ActivationPacking:
        """The packing of one rank's part of the whole, which is not moved."""
        size = self.move.size
        if self.move.dim == 0:
            assert self.rows % size == 0, f"{self.rows} rows do not split by {size}"
            return replace(self, move=STAYS, rows=self.rows // size)
        assert not any(width % size for width in self.sent), f"{self.sent} do not split by {size}"
        assert not self.is_padded, "features that are scattered divide"
        widths = tuple(width // size for width in self.widths)
        return replace(self, move=STAYS, widths=widths, sent=widths)

    def read(self, buffer: Tensor) -> list[BlockMatrix]:
        """Return the whole matrices in `buffer` (parts, ...): views."""
        if len(self.sent) == 1 and self.move.dim == 0 and not self.is_padded:
            return [BlockMatrix((buffer.view(self.rows, self.sent[0]),))]
        pieces, start, part = [], 0, self.part
        for width, sent, length in zip(self.widths, self.sent, part.sent):
            stop = start + part.rows * length
            parts = (flat[start:stop].view(part.rows, length) for flat in buffer.view(self.move.size, -1).unbind(0))
            own = tuple(matrix if sent == width else matrix[:, :width] for matrix in parts)
            pieces.append(BlockMatrix(own, self.move.dim))
            start = stop
        return pieces

    def new(self, like: Tensor) -> tuple[Tensor, list[BlockMatrix]]:
        """Return (a buffer to be scattered, the whole matrices to be written in it)."""
        shape = (self.move.size, self.part.rows * sum(self.part.sent))
        buffer = (like.new_zeros if self.is_padded else like.new_empty)(shape)
        return buffer, self.read(buffer)

    def start_scatter(self, buffer: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to sum the buffer of `new`; the result is this rank's part of every activation."""
        scattering, own = start_reduce_scatter(buffer, self.move.group, ACTIVATIONS), self.part
        return lambda: tuple(own.shaped(matrix.parts[0]) for matrix in own.read(scattering()))

    def start_gather(self, parts: Sequence[Tensor]) -> Finish:
        """Begin to gather this rank's part of every activation; `read` reads the result."""
        if self.is_padded:
            parts = [functional.pad(part, (0, sent - part.size(-1))) for part, sent in zip(parts, self.sent)]
        flat = parts[0].reshape(-1) if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        return start_all_gather(flat, self.move.group, ACTIVATIONS)

    def gather(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather this rank's part of every activation, each as one tensor."""
        return tuple(self.shaped(matrix.joined()) for matrix in self.read(self.start_gather(parts)()))

    def scatter(self, partial: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sum partial activations, each one tensor; return this rank's part of each."""
        buffer, matrices = self.new(partial[0])
        for matrix, source in zip(matrices, partial):
            matrix.fill(source.flatten(0, -2))
        return self.start_scatter(buffer)()

    def shaped(self, matrix: Tensor) -> Tensor:
        """Return the activation in a matrix. No view as autograd sees it: outputs of nodes may be changed in place."""
        return matrix.view(-1, *self.inner, matrix.size(1)).detach()


def input_packing(x: Tensor, move: MoveGroup) -> ActivationPacking:
    """Return the packing of X, of which this rank has `x` (samples, ..., features): it is gathered, dX is scattered."""
    rows, width = x.numel() // x.size(-1), x.size(-1)
    rows, width = (rows, width * move.size) if move.dim else (rows * move.size, width)
    return ActivationPacking(move, rows, tuple(x.shape[1:-1]), (width,), (width,))


@dataclass(frozen=True)
class WeightPacking:
    """How the local rows of several weights follow each other in one buffer, and which of them pad.

    groups: over which W is gathered, minor-most axis first; none where it is multiplied as it is stored. rows: of each
    weight, padded to the largest part. valid: of each weight, the real rows of every gathered part, in order.
    widths: of each output, the features of the rank that has most.
    """

    groups: tuple[Group, ...]
    rows: tuple[int, ...]
    valid: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]

    @cached_property
    def num_parts(self) -> int:
        return prod(group.size for group in self.groups)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The rows of each weight after the gather: the features of each output before it is scattered."""
        return tuple(map(sum, self.valid))

    @cached_property
    def is_padded(self) -> bool:
        return any(real != rows for rows, valid in zip(self.rows, self.valid) for real in valid)

    def pack(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return (sum of rows, columns): this rank's rows of every weight, rounded to `dtype`."""
        missing = [rows - weight.size(0) for weight, rows in zip(weights, self.rows)]
        parts = [functional.pad(w, (0, 0, 0, n)) if n else w for w, n in zip(weights, missing)]
        return parts[0].to(dtype) if len(parts) == 1 else torch.cat([part.to(dtype) for part in parts])

    def matrices(self, buffer: Tensor) -> list[BlockMatrix]:
        """Return the gathered weights in `buffer` (parts, sum of rows, columns): views, without padding."""
        if len(self.rows) == 1 and not self.is_padded:
            return [BlockMatrix((buffer.flatten(0, 1),))]
        matrices = []
        for gathered, valid in zip(buffer.split(self.rows, dim=1), self.valid):
            parts = tuple(part[:real] for part, real in zip(gathered, valid) if real)
            matrices.append(BlockMatrix(parts or (gathered[0, :0],)))
        return matrices

    def start(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Callable[[], Sequence[Tensor]]:
        """Begin to gather the stored weights, if they are; `read` reads the result."""
        if not self.groups:
            return lambda: weights
        gathering = self.start_gather(weights, dtype)
        return lambda: [gathering()]

    def read(self, operands: Sequence[Tensor], dtype: torch.dtype) -> list[BlockMatrix]:
        """Return every W: out of the gathered buffer, or, where none is gathered, out of the stored ones."""
        return self.matrices(operands[0]) if self.groups else [BlockMatrix((w.to(dtype),)) for w in operands]

    def new(self, like: Tensor, columns: int) -> list[Tensor]:
        """Return what `read` reads, for gradients of weights with so many columns."""
        if not self.groups:
            return [like.new_empty((rows, columns)) for rows in self.lengths]
        shape = (self.num_parts, sum(self.rows), columns)
        return [(like.new_zeros if self.is_padded else like.new_empty)(shape)]

    def start_gather(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Finish:
        """Begin to gather the weights, rounded to `dtype`; `matrices` reads the result."""
        inner = start_all_gather(self.pack(weights, dtype), next(iter(self.groups), None), WEIGHTS)

        def finish() -> Tensor:
            buffer = inner()
            for group in self.groups[1:]:
                buffer = start_all_gather(buffer.flatten(0, 1), group, WEIGHTS)()
            return buffer.view(self.num_parts, sum(self.rows), -1)

        return finish

    def start_scatter(self, buffer: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to sum gradients arranged as `matrices` reads them; the result is this rank's padded rows of each."""

        def start(parts: Tensor, group: Group | None) -> Finish:
            by_rank = parts.view(group.size if group else 1, -1, parts.size(-1))
            return start_reduce_scatter(by_rank, group, WEIGHT_GRADIENTS)

        outer = start(buffer, self.groups[-1] if self.groups else None)

        def finish() -> list[Tensor]:
            own = outer()
            for group in reversed(self.groups[:-1]):
                own = start(own, group)()
            return list(own.view(sum(self.rows), -1).split(self.rows))

        return finish


def weight_packing(
    product: Product, mesh: Mesh, weights: Sequence[Tensor], out_features: Sequence[int] | None = None
) -> WeightPacking:
    """Return how `weights` are packed. out_features: the global length of dim 0 of each; None: every part is as large
    as this rank's (true of whatever divides: all but a vocabulary)."""
    groups = tuple(group for axis in product.gather_w if (group := mesh.group(axis)).size > 1)
    num_parts = prod(group.size for group in groups)
    first, sizes = product.weight.dims[0], mesh.shape.sizes
    num_splits = prod(sizes.get(axis, 1) for axis in first)
    if out_features is None or not any(length % num_splits for length in out_features):
        rows = tuple(weight.size(0) for weight in weights)
        return WeightPacking(
            groups, rows, tuple((own,) * num_parts for own in rows), tuple(n * num_parts for n in rows)
        )
    layout, outer = Layout((first,)), tuple(reversed(groups))
    parts = [
        {**mesh.coordinate, **{group.axis: index for group, index in zip(outer, indices)}}
        for indices in coordinates(*(range(group.size) for group in outer))
    ]
    valid = tuple(tuple(layout.local_numel((length,), sizes, part) for part in parts) for length in out_features)
    largest = tuple(layout.local_numel((length,), sizes, {}) for length in out_features)
    outputs = Layout(product.gathered_weight.dims[:1])
    widths = tuple(outputs.local_numel((length,), sizes, {}) for length in out_features)
    return WeightPacking(groups, largest, valid, widths)


def output_packing(move: MoveGroup, source: ActivationPacking, weights: WeightPacking) -> ActivationPacking:
    """Return the packing of every Y of an X: they are scattered, and their gradients gathered."""
    sent = weights.widths if move.group else weights.lengths
    return ActivationPacking(move, source.rows, source.inner, weights.lengths, sent)
