"""Planted bugs of adapters (LoRA) of rank 3 under tensor parallelism."""

from __future__ import annotations

import torch

from parallelrun.strategies.tensor.megatron import layers, operators

RANK = 3


def gradients_of_first_factors_not_summed() -> None:
    """Each rank's rows of B give their own gradient to the replicated A of a column-parallel layer."""
    right = operators._start_reduce
    operators._start_reduce = lambda grad, ctx: (lambda: grad) if grad.size(-1) == RANK else right(grad, ctx)


def products_of_first_factors_not_summed() -> None:
    """B of a row-parallel layer reads what the columns of A on its rank give."""
    right = layers.reduce_or_scatter

    def wrong(x: torch.Tensor, tp: operators.TPContext) -> torch.Tensor:
        return x if x.size(-1) == RANK else right(x, tp)

    layers.reduce_or_scatter = wrong


def adapters_summed_with_row_products() -> None:
    """The whole product of B is added before the sum over the ranks: tp times."""
    from parallelrun.models.module import lora

    right = lora._add_update

    def wrong(
        scale: float, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> torch.Tensor:
        is_row = isinstance(layer, layers.RowParallelLinear)
        return right(scale * (layer.tp.group.size if is_row else 1), layer, inputs, out)

    lora._add_update = wrong
