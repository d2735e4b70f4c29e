"""Token ids -> rows of a table that is split as the head's weight: a product with one-hot rows, without the product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.autograd import apply
from parallelrun.planner.model.product import Product

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
        ctx.packed, ctx.reduce, ctx.own, ctx.stored = packed, options.reduce, table.size(0), table.dtype
        ctx.save_for_backward(index)
        gathered, width = packed.start_gather([table], options.compute)().flatten(0, 1), (table.size(1),)
        elsewhere = index >= gathered.size(0)
        rows = functional.embedding(index.masked_fill(elsewhere, 0), gathered).masked_fill_(elsewhere.unsqueeze(-1), 0)
        outputs = ctx.outputs = ActivationPacking(move, index.numel(), tuple(index.shape[1:]), width, width)
        return outputs.scatter([rows])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (index,), packed = ctx.saved_tensors, ctx.packed
        (gathered,) = ctx.outputs.gather([grad])
        num_rows = packed.num_parts * packed.rows[0]
        sums = grad.new_zeros((num_rows + 1, gathered.size(-1)), dtype=ctx.reduce)
        sums.index_add_(0, index.flatten(), gathered.flatten(0, -2).to(ctx.reduce))
        (own,) = packed.start_scatter(sums[:num_rows].view(packed.num_parts, packed.rows[0], -1))()
        return own[: ctx.own].to(ctx.stored), *(None,) * 4
