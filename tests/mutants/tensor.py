"""Planted bugs of one-dimensional tensor parallelism."""

from __future__ import annotations

import torch

from parallelrun.base.layout import Layout
from parallelrun.distributed import comm
from parallelrun.models import float8
from parallelrun.models import layers as single_device
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.moe.layer import AuxiliaryLoss
from parallelrun.strategies.tensor.common import cross_entropy
from parallelrun.strategies.tensor.megatron import layers, operators
from parallelrun.strategies.tensor.megatron.plan import Megatron1D


def input_gradient_not_summed_apart() -> None:
    operators._CopyToTP.backward = staticmethod(lambda ctx, grad: (grad, None))


def input_gradient_summed_twice() -> None:
    once = operators._start_reduce

    def twice(grad, ctx):
        comm.all_reduce(grad, ctx.group, "activations")
        return once(grad, ctx)

    operators._start_reduce = twice


def backward_reads_weights_that_are_not_rounded() -> None:
    float8.sum_of_products = lambda grads, weights: sum(g.widened() @ weight for g, weight in zip(grads, weights))


def output_averaged() -> None:
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, "activations")
        return x.div_(group.size)

    operators._ReduceFromTP.forward = staticmethod(forward)


def target_counted_by_every_rank() -> None:
    own = cross_entropy._own_column
    cross_entropy._own_column = lambda targets, start, n: (
        own(targets, start, n)[0],
        torch.ones_like(targets, dtype=torch.bool),
    )


def largest_logit_of_the_shard() -> None:
    right = comm.all_reduce
    cross_entropy.comm.all_reduce = lambda *a, **k: None if k.get("op") == "max" else right(*a, **k)


def z_loss_of_the_shard() -> None:
    right = cross_entropy.VocabParallelLoss.forward

    def wrong(self, logits, targets):
        weight, self.z_loss = self.z_loss, 0.0
        loss = right(self, logits, targets)
        self.z_loss = weight
        return loss + weight * logits.logsumexp(-1).square()[targets >= 0].sum()

    cross_entropy.VocabParallelLoss.forward = wrong


def tokens_of_other_shards_not_masked() -> None:
    class Embedding(layers.VocabParallelEmbedding):
        def _own_rows(self, tokens):
            return torch.nn.functional.embedding(tokens % self.weight.size(0), self.weight).to(self.compute_dtype)

    layers.VocabParallelEmbedding = Embedding


def positions_of_the_first_slice() -> None:
    layers.SequencePositionEmbedding.forward = single_device.PositionEmbedding.forward


def mask_of_the_first_slice() -> None:
    layers.SliceDropout.forward = HashDropout.forward


def slices_of_norm_gradients_not_summed() -> None:
    right = Megatron1D.layout
    Megatron1D.layout = lambda self, parameter, plan: Layout(right(self, parameter, plan).dims)


def router_gradients_not_summed() -> None:
    _not_summed("router")


def gradients_of_head_norms_not_summed() -> None:
    _not_summed("per_head")


def norm_of_own_heads() -> None:
    _norm_of_own_heads(dims=2)  # a number for each token


def norm_gradient_of_own_heads() -> None:
    _norm_of_own_heads(dims=3)


def _norm_of_own_heads(dims: int) -> None:
    right = comm.all_reduce

    def own(tensor, group, label, **options):
        mine = label == "norm" and tensor.dim() == dims
        return tensor.mul_(group.size) if mine else right(tensor, group, label, **options)

    comm.all_reduce = own


def _not_summed(role: str) -> None:
    right = Megatron1D.layout

    def layout(self, parameter, plan):
        found = right(self, parameter, plan)
        return Layout(found.dims) if parameter.layer_role == role else found

    Megatron1D.layout = layout


def entered_without_summing_gradients() -> None:
    layers.PARALLEL_LAYERS.pop(single_device.ExpertInput)


def left_without_summing() -> None:
    layers.PARALLEL_LAYERS.pop(single_device.ExpertOutput)


def auxiliary_loss_of_every_rank() -> None:
    right = AuxiliaryLoss.forward
    AuxiliaryLoss.forward = staticmethod(lambda ctx, y, auxiliary, scale: right(ctx, y, auxiliary, 2 * scale))


def sinks_summed_over_tp() -> None:
    """The gradients of sinks are summed as those of replicated weights are, though each rank has its own heads."""
    right = Megatron1D.layout

    def wrong(self, parameter, plan):
        layout = right(self, parameter, plan)
        return Layout(layout.dims, ("tp",)) if parameter.layer_role == "attention" else layout

    Megatron1D.layout = wrong


def last_biases_of_every_rank() -> None:
    """Each rank with a part of an expert adds its last bias completely."""
    from parallelrun.models.moe.experts import Experts

    right = Experts.forward

    def wrong(self, rows, counts=None):
        self.ffn = self.up.size(1)
        return right(self, rows, counts)

    Experts.forward = wrong
