"""Bugs that people have had, planted one by one: the comparison with one device sees each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.layout import Layout
from parallelrun.config.schema.model_schema import RouterConfig
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models import layers as single_device
from parallelrun.models.masked_layers import HashDropout
from parallelrun.models.moe.layer import AuxiliaryLoss
from parallelrun.strategies.tensor.common import cross_entropy
from parallelrun.strategies.tensor.megatron import layers, operators, runtime
from parallelrun.strategies.tensor.megatron.plan import Megatron1D
from tests.pool import run_ranks
from tests.tensor_cases import AUXILIARY, BOUND, Proof, llama, prove_gpt

SEQUENCE = {"strategy.tensor.sequence_parallel": True}
APART = {"strategy.tensor.overlap": False}


def bias_added_on_every_rank():
    def forward(self, x):
        partial = single_device.linear(x, self.weight, self.bias, self.compute_dtype)
        return operators.reduce_or_scatter(partial, self.tp)

    layers.RowParallelLinear.forward = forward


def input_gradient_not_summed():
    operators._start_reduce = lambda grad, ctx: lambda: grad


def input_gradient_not_summed_apart():
    operators._CopyToTP.backward = staticmethod(lambda ctx, grad: (grad, None))


def input_gradient_summed_twice():
    once = operators._start_reduce

    def twice(grad, ctx):
        comm.all_reduce(grad, ctx.group, "activations")
        return once(grad, ctx)

    operators._start_reduce = twice


def output_averaged():
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        comm.all_reduce(x, group, "activations")
        return x.div_(group.size)

    operators._ReduceFromTP.forward = staticmethod(forward)


def wrong_group():
    """The tensor strategy sends over dp: same size, other ranks."""
    right = Mesh.group
    Mesh.group = lambda self, axis: replace(right(self, "dp"), axis="tp") if axis == "tp" else right(self, axis)


def smoothing_over_the_shard():
    class Loss(cross_entropy.VocabParallelLoss):
        def forward(self, logits, targets):
            self.vocab = logits.size(-1)
            return super().forward(logits, targets)

    runtime.VocabParallelLoss = Loss


def target_counted_by_every_rank():
    own = cross_entropy._own_column
    cross_entropy._own_column = lambda targets, start, n: (
        own(targets, start, n)[0],
        torch.ones_like(targets, dtype=torch.bool),
    )


def largest_logit_of_the_shard():
    right = comm.all_reduce
    cross_entropy.comm.all_reduce = lambda *a, **k: None if k.get("op") == "max" else right(*a, **k)


def tokens_of_other_shards_not_masked():
    class Embedding(layers.VocabParallelEmbedding):
        def _own_rows(self, tokens):
            return torch.nn.functional.embedding(tokens % self.weight.size(0), self.weight).to(self.compute_dtype)

    layers.VocabParallelEmbedding = Embedding


def positions_of_the_first_slice():
    layers.SequencePositionEmbedding.forward = single_device.PositionEmbedding.forward


def mask_of_the_first_slice():
    layers.SliceDropout.forward = HashDropout.forward


def slices_of_norm_gradients_not_summed():
    right = Megatron1D.layout
    Megatron1D.layout = lambda self, parameter, plan: Layout(right(self, parameter, plan).dims)


def router_gradients_not_summed():
    right = Megatron1D.layout

    def layout(self, parameter, plan):
        found = right(self, parameter, plan)
        return Layout(found.dims) if parameter.layer_role == "router" else found

    Megatron1D.layout = layout


def entered_without_summing_gradients():
    layers.PARALLEL_LAYERS.pop(single_device.SharedInput)


def left_without_summing():
    layers.PARALLEL_LAYERS.pop(single_device.ExpertOutput)


def auxiliary_loss_of_every_rank():
    right = AuxiliaryLoss.forward
    AuxiliaryLoss.forward = staticmethod(lambda ctx, y, auxiliary, scale: right(ctx, y, auxiliary, AUXILIARY))


EXPERTS = {"model.experts": 4, "model.expert_period": 1, "model.router": RouterConfig(kind="gshard")}
MUTANTS = {
    bias_added_on_every_rank: {},
    input_gradient_not_summed: {},
    input_gradient_not_summed_apart: APART,
    input_gradient_summed_twice: {},
    output_averaged: {},
    wrong_group: {"dp": 2, "global_batch": 4},
    smoothing_over_the_shard: {"model.label_smoothing": 0.1},
    target_counted_by_every_rank: {},
    largest_logit_of_the_shard: {},
    tokens_of_other_shards_not_masked: {},
    positions_of_the_first_slice: SEQUENCE,
    mask_of_the_first_slice: {**SEQUENCE, "dropout": 0.2},
    slices_of_norm_gradients_not_summed: SEQUENCE,
    router_gradients_not_summed: EXPERTS,
    entered_without_summing_gradients: EXPERTS,
    left_without_summing: EXPERTS,
    auxiliary_loss_of_every_rank: EXPERTS,
}


def prove_mutant(name: str, overrides: dict) -> Proof:
    """Body of a rank."""
    if name:
        globals()[name]()
    dist.barrier()
    return prove_gpt(overrides)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_seen(mutant):
    overrides = {"tp": 2, "model.layers": 1, **MUTANTS[mutant]}
    proofs = run_ranks(2 * overrides.get("dp", 1), prove_mutant, mutant.__name__, overrides)
    assert max(proof.error for proof in proofs) > 1e6 * BOUND


def test_gradients_of_copied_kv_heads_not_summed_are_seen():
    overrides = llama(tp=4, model__layers=1)
    proofs = run_ranks(4, prove_mutant, slices_of_norm_gradients_not_summed.__name__, overrides)
    worst = max(proofs, key=lambda proof: proof.error)
    assert worst.error > 1e6 * BOUND and worst.where.split(".")[-2] in ("k", "v")


def test_without_a_bug_the_same_comparison_is_equal():
    for others, ranks in ((MUTANTS[wrong_group], 4), (EXPERTS, 2)):  # the other plans: test_tensor_gpt
        overrides = {"tp": 2, "model.layers": 1, **others}
        assert max(proof.error for proof in run_ranks(ranks, prove_mutant, "", overrides)) < BOUND
