"""Token ids -> rows of a table that is split as the head's weight: a product with one-hot rows, without the product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallelrun.layout import Layout
from parallelrun.mesh import Mesh
from parallelrun.models.autograd import apply
from parallelrun.product import Product

from .block_matrix import BlockMatrix
from .buffers import ActivationPacking, MoveGroup, WeightPacking, move_group, weight_packing
from .matmul import MatmulOptions


def look_up(ids: Tensor, table: Tensor, product: Product, mesh: Mesh, options: MatmulOptions, vocab: int) -> Tensor:
    """Rows of the table for token ids, in the compute dtype and the layout `product.y`.

    ids: int64 (samples, ...) of the rows that `product.x` splits; table: this rank's (rows, features) as stored, of
    `vocab` rows in all. An id that is no row of the table gives zeros.
    """
    first = product.gathered_weight.dims[0]
    ((start, stop),) = Layout((first,)).ranges((vocab,), mesh.shape.sizes, mesh.coordinate)
    packed = weight_packing(product, mesh, [table], [vocab])
    (padded,), (valid,) = packed.rows, packed.valid
    index = ids - start
    elsewhere = (index < 0) | (index >= stop - start)
    if packed.is_padded:  # the row of the gathered buffer that holds each id
        real = [torch.arange(rows, device=ids.device) + part * padded for part, rows in enumerate(valid)]
        index = torch.cat([*real, index.new_zeros(1)])[index.masked_fill(elsewhere, stop - start)]
    index = index.masked_fill(elsewhere, packed.num_parts * padded)
    return apply(_LookUp, table, index, packed, move_group(product.scatter_y, mesh), options)


class _LookUp(torch.autograd.Function):
    """Rows of the gathered table, scattered. index: of rows; one behind the last: of those that other ranks have.

    One node, even for a split backward: it yields no input gradient, so that only the pass for weights runs it.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, index: Tensor, packed: WeightPacking, move: MoveGroup, options: MatmulOptions
    ) -> Tensor:
        ctx.packed, ctx.reduce, width = packed, options.reduce, table.size(1)
        ctx.own, ctx.stored = table.size(0), table.dtype
        ctx.save_for_backward(index)
        whole = packed.start_gather([table], options.compute)().flatten(0, 1)
        bundle = ctx.bundle = ActivationPacking(move, index.numel(), tuple(index.shape[1:]), (width,), (width,))
        buffer, (out,) = bundle.new(whole)
        for part, rows, some in _by_part(whole, index.flatten(), out):
            torch.index_select(rows, 0, some.clamp(max=rows.size(0) - 1), out=part)
            part.masked_fill_((some >= rows.size(0)).unsqueeze(1), 0)
        return bundle.start_scatter(buffer)()[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,), packed, bundle = ctx.saved_tensors, ctx.packed, ctx.bundle
        (whole,) = bundle.read(bundle.start_gather([grad])())
        num_rows, width = packed.num_parts * packed.rows[0], whole.shape[1]
        sums = grad.new_zeros((num_rows + 1, width), dtype=ctx.reduce)
        for part, rows, some in _by_part(sums, index.flatten(), whole):
            rows.index_add_(0, some, part.to(ctx.reduce))
        (own,) = packed.start_scatter(sums[:num_rows].view(packed.num_parts, -1, width))()
        return own[: ctx.own].to(ctx.stored), *(None,) * 4


def _by_part(table: Tensor, index: Tensor, matrix: BlockMatrix) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(part of the output, the table as it is read for it, index into that): a part has some of the rows, or some of
    the features of all rows; a table of narrower rows gives those without a copy."""
    size = len(matrix.parts)
    if matrix.dim == 0:
        for part, some in zip(matrix.parts, index.chunk(size)):
            yield part, table, some
    else:
        narrow = table.view(table.size(0) * size, -1)
        for number, part in enumerate(matrix.parts):
            yield part, narrow, index * size + number
