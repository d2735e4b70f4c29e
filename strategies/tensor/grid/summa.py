"""SUMMA: products of panels of K, broadcast along the grid or reduced onto it; only local blocks are ever kept.

The three forms (van de Geijn and Watts 1997; Xu et al. 2021), with Y (rows, N), X (rows, K) and W (N, K) in blocks:

    Y  = X W^T    panels of X along a row of ranks and of W along a column are broadcast, their products added
    dX = dY W     panels of W are broadcast, their products reduced to the owners of dX's panels
    dW = dY^T X   panels of X are broadcast, their products reduced to the owners of dW's panels

While one panel is multiplied, the next one is being broadcast and the last product is being reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.models.autograd import apply_to_all
from parallelrun.planner.model.product import Product, num_panels

from ..common.transfers import Finish, sum_of_products, when_done
from .buffers import ACTIVATIONS, WEIGHT_GRADIENTS, WEIGHTS


@dataclass(frozen=True)
class Panels:
    """The panels of K of one operand: `count` in all, each rank of `group` has as many, one after the other."""

    group: Group
    count: int
    purpose: str

    def owner(self, number: int, width: int) -> tuple[int, slice]:
        """(owner in the group, columns of its block of `width`) of a panel."""
        each = self.count // self.group.size
        owner, index = divmod(number, each)
        return owner, slice(index * width // each, (index + 1) * width // each)

    def start_broadcast(self, block: Tensor, number: int) -> Finish:
        """Begin to send panel `number` out of its owner's block; gives the panel, on every rank."""
        owner, columns = self.owner(number, block.size(1))
        if owner == self.group.index:
            panel = block[:, columns].contiguous()
        else:
            panel = block.new_empty((block.size(0), columns.stop - columns.start))
        return when_done(comm.broadcast(panel, self.group, self.purpose, owner, async_op=True), panel)

    def start_reduce(self, partial: Tensor, number: int, block: Tensor, purpose: str) -> Callable[[], None]:
        """Begin to sum the product of panel `number` into its columns of its owner's `block`."""
        owner, columns = self.owner(number, block.size(1))
        partial = partial.to(block.dtype)
        reducing = when_done(comm.reduce(partial, self.group, purpose, owner, async_op=True), partial)

        def finish() -> None:
            total = reducing()
            if owner == self.group.index:
                block[:, columns] = total

        return finish


@dataclass(frozen=True)
class _Grid:
    """The panels of X and of W, and the dtype in which dW is summed."""

    x: Panels
    w: Panels
    reduce: torch.dtype

    def panels(self, x: Tensor | None, w: Tensor | None) -> Iterator[tuple[int, Any, Any]]:
        """Yield (number, panel of X, panel of W) in turn, while the next ones are broadcast; None for an operand that
        is not read."""
        blocks = ((self.x, x), (self.w, w))

        def start(number: int) -> list[Finish | None]:
            return [None if block is None else panels.start_broadcast(block, number) for panels, block in blocks]

        coming = start(0)
        for number in range(self.x.count):
            x_panel, w_panel = (finish() if finish else None for finish in coming)
            coming = start(number + 1) if number + 1 < self.x.count else []
            yield number, x_panel, w_panel


def multiply(
    x: Tensor, weights: Sequence[Tensor], product: Product, mesh: Mesh, reduce: torch.dtype, fused: bool
) -> tuple[Tensor, ...]:
    """X times each weight, without bias. fused: one node gives both gradients, which share a pass over the panels; else
    one node gives dX, and one that adds nothing gives dW."""
    (across,), (along,) = product.x.features, product.weight.dims[1]
    count = num_panels(product, mesh.shape.sizes)
    grid = _Grid(Panels(mesh.group(across), count, ACTIVATIONS), Panels(mesh.group(along), count, WEIGHTS), reduce)
    if fused:
        return apply_to_all(_Summa, x, grid, *weights)
    out = apply_to_all(_Summa, x, grid, *(weight.detach() for weight in weights))
    return tuple(y.add_(zero) for y, zero in zip(out, apply_to_all(_OfWeights, x.detach(), grid, *weights)))


class _Summa(torch.autograd.Function):
    """All three forms in one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: _Grid, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.grid = grid
        ctx.save_for_backward(x, *weights)
        widths = [weight.size(0) for weight in weights]
        out = tuple(x.new_empty((*x.shape[:-1], width)) for width in widths)
        rows = [y.view(-1, y.size(-1)) for y in out]

        for number, x_panel, w_panel in grid.panels(x.flatten(0, -2), _packed(weights, x.dtype)):
            for y, part in zip(rows, w_panel.split(widths)):
                y.addmm_(x_panel, part.t(), beta=min(number, 1))  # 0: Y has no values yet
            del x_panel, w_panel, part  # else three panels at once
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grid, wants_x, wants_weights = ctx.grid, ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        x, shape = x.flatten(0, -2), x.shape
        rows = [grad.reshape(x.size(0), -1) for grad in grads]
        widths = [weight.size(0) for weight in weights]
        dx = torch.empty_like(x) if wants_x else None
        dw = x.new_empty((sum(widths), weights[0].size(1)), dtype=grid.reduce) if wants_weights else None

        flying: list[Callable[[], None]] = []
        packed = _packed(weights, x.dtype) if wants_x else None
        for number, x_panel, w_panel in grid.panels(x if wants_weights else None, packed):
            landing, flying = flying, []
            if dx is not None:
                flying.append(
                    grid.x.start_reduce(sum_of_products(rows, w_panel.split(widths)), number, dx, ACTIVATIONS)
                )
            if dw is not None:
                partial = x_panel.new_empty((sum(widths), x_panel.size(1)))
                for grad, part in zip(rows, partial.split(widths)):
                    torch.mm(grad.t(), x_panel, out=part)
                flying.append(grid.w.start_reduce(partial, number, dw, WEIGHT_GRADIENTS))
            del x_panel, w_panel  # else three panels at once
            for finish in landing:
                finish()
        for finish in flying:
            finish()
        own = dw.split(widths) if dw is not None else [None] * len(weights)
        gradients = [None if part is None else part.to(weight.dtype) for part, weight in zip(own, weights)]
        return None if dx is None else dx.view(shape), None, *gradients


class _OfWeights(_Summa):
    """Zeros with the gradients of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: _Grid, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.grid = grid
        ctx.save_for_backward(x, *weights)
        return tuple(x.new_zeros(()).expand(*x.shape[:-1], weight.size(0)) for weight in weights)


def _packed(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Every weight's block, one under the other: one panel for all."""
    return weights[0].to(dtype) if len(weights) == 1 else torch.cat([weight.to(dtype) for weight in weights])
