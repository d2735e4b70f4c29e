"""Planted bugs of ep over dp x tp, whose ranks of tp divide the tokens of a layer with experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from parallelrun.base.layout import Layout
from parallelrun.distributed import comm


def rows_dispatched_by_every_rank_of_tp() -> None:
    """No rank takes a slice: results are right, and every expert gets the rows of a token from each rank of tp."""
    from parallelrun.strategies.expert.common import token_slices

    token_slices.divide = lambda *arguments: None


def expert_gradients_summed_over_tp() -> None:
    """Complete experts are taken for parameters whose gradients are partial sums, as those of norms are."""
    from parallelrun.strategies.tensor.megatron.plan import Megatron1D

    right = Megatron1D.layout

    def layout(self: Megatron1D, parameter: Any, plan: Any) -> Layout:
        is_partial = parameter.layer_role == "expert" and plan.ep_spans_tp
        return Layout(right(self, parameter, plan).dims, ("tp",)) if is_partial else right(self, parameter, plan)

    Megatron1D.layout = layout


def slice_of_another_rank() -> None:
    """A rank sends another slice than the one whose routing it has."""
    from parallelrun.strategies.expert.common import token_slices

    token_slices._sliced = lambda x, group: x.chunk(group.size, 1)[group.size - 1 - group.index].contiguous()


def gradients_of_gathered_results_summed() -> None:
    """As autograd's own all-gather: equal gradients of all ranks are added."""
    from parallelrun.strategies.expert.common import token_slices

    right = token_slices._Slices.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.gathers:
            return right(ctx, grad)
        return comm.reduce_scatter(grad, ctx.group, token_slices.ROWS, 1), None, None

    token_slices._Slices.backward = staticmethod(backward)


def gradients_of_slices_not_gathered() -> None:
    """What is behind a slice gives the layers before it the gradient of that slice alone."""
    from parallelrun.strategies.expert.common import token_slices

    right = token_slices._Slices.backward

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gathered, *rest = right(ctx, grad)
        if not ctx.gathers:
            size = grad.size(1)
            gathered[:, : ctx.group.index * size] = gathered[:, (ctx.group.index + 1) * size :] = 0
        return gathered, *rest

    token_slices._Slices.backward = staticmethod(backward)


def jitter_of_the_first_slice() -> None:
    """Every slice draws for the first tokens of a sequence."""
    from parallelrun.models.local_tokens import ALL
    from parallelrun.strategies.expert.common import token_slices

    right = token_slices.divide

    def divide(layer: Any, *arguments: Any) -> None:
        right(layer, *arguments)
        layer.router.__dict__["local_tokens"] = ALL

    token_slices.divide = divide
