"""Every planted bug is caught by verify's comparison, and the same plan without it passes."""

from __future__ import annotations

from inspect import getmembers, isfunction
from typing import Any

import pytest

from tests.matrix import FULL
from tests.mutants import MODULES
from tests.parity import assert_equal, parity
from tests.plans import llama
from tests.ranks import test_context_attention as context
from tests.ranks import test_heads_parity as heads
from tests.ranks import test_objectives_parity as objectives
from tests.ranks import test_staged_modules as staged
from tests.ranks.test_data_experts import FSDP, HALF, MOE, THREE, ZERO1, ZERO2
from tests.ranks.test_finetuning import LORA, MODULE
from tests.ranks.test_grid_parity import BASE, COLUMNS, CUBE, DEEP, DROPS, ONE_LAYER, ROWS, SQUARE, form
from tests.ranks.test_latent_parity import LATENT
from tests.ranks.test_muon import MUON
from tests.ranks.test_other_modules import Arguments
from tests.vision import RESNET, VGG

Overrides = dict[str, Any]
COMMON: Overrides = {
    "model.vocab": 37, "dataset.vocab": 37, "model.label_smoothing": 0.1, "global_batch": 16, "optimizer.clip": 0.05,
}  # fmt: skip
DP = {**COMMON, "dp": 2}
TP = {**COMMON, "tp": 2}
PP = {**COMMON, "pp": 2}
BOTH = {**COMMON, "dp": 2, "tp": 2}
SEQUENCE = {**TP, "strategy.tensor.sequence_parallel": True}
CHUNKED = {**TP, "loss_chunks": 3, "microbatches": 4}  # of 5 or 6 tokens: sound in test_parity.py
DATA_FSDP = {**DP, **FSDP}
RING = {"dp": 2, "strategy.data.kind": "ring"}  # even shards: a crash would prove nothing
STAGED = {**staged.MODULE, "pp": 2}
ROUTED = {
    "tp": 2, "model.layers": 1, "model.experts": 4, "model.expert_period": 1, "model.router.kind": "gshard",
    "model.router.top_k": 2, "model.router.aux_coefficient": 0.3,
}  # fmt: skip
SPANS = {**ROUTED, "ep": 2, "strategy.expert.tp": 1, "optimizer.clip": 0.05}
SLICES, COPIES = {**SPANS, "strategy.tensor.sequence_parallel": True}, {**SPANS, "dp": 2}
GRID = {**BASE, **ONE_LAYER, "verify.steps": 1}
GRID_ROWS, GRID_COLUMNS, CP = {**GRID, **ROWS}, {**GRID, **COLUMNS}, {"cp": 2}
GRID_EXPERTS = {**ROUTED, **ROWS, "optimizer.clip": 0.05}
GRID_LATENT = {**LATENT, **ONE_LAYER}
BIASED = {"model.router.kind": "top_k", "model.router.bias_rate": 0.05, "verify.steps": 2}
ADAPTED = {**MODULE, **LORA}
CHANNELS = {**RESNET, "tp": 2, "verify.steps": 1}
SINKS = llama(model__sinks=True, model__layers=1)
HALF_EXPERTS, THREE_EXPERTS = {**MOE, **HALF}, {**MOE, **THREE}
# A mutant stands as often as it has plans.
PLANTED: list[tuple[str, Overrides]] = [
    ("dropped_gradient_reduce", DP),
    ("doubled_gradient_reduce", DP),
    ("mean_for_sum", DP),
    ("wrong_group", BOTH),
    ("max_for_sum", TP),
    ("input_gradient_not_reduced", TP),
    ("chunk_averaged", CHUNKED),
    ("gradient_of_the_last_chunk", CHUNKED),
    ("inputs_of_the_next_block", {**PP, "recompute": "offload", "model.layers": 4}),
    ("offloaded_gradients_of_the_first_step", {**DP, "optimizer.offload": True, "verify.steps": 2}),
    ("skipped_block", PP),
    ("untied_embedding", PP),
    ("received_at_the_embedding", STAGED),
    ("sent_from_the_next_block", {**STAGED, "model.arguments": Arguments(twist="between blocks")}),
    ("bias_added_by_every_rank", TP),
    ("input_gradient_not_reduced", CHANNELS),
    ("bias_of_channels_added_by_every_rank", {**VGG, "tp": 2}),
    ("convolutions_of_own_channels", CHANNELS),
    ("statistics_of_the_first_channels", CHANNELS),
    ("norm_counts_replicas", TP),
    ("label_smoothing_by_shard", TP),
    ("fsdp_divides", DATA_FSDP),
    ("fsdp_divides_below_the_root", DATA_FSDP),
    ("partial_norms", SEQUENCE),
    ("backward_reads_weights_that_are_not_rounded", {**SEQUENCE, "precision.name": "fp8"}),
    ("stale_weights", {**DP, **ZERO1}),
    ("local_count", DP),
    ("same_samples_everywhere", DP),
    ("initial_weights_by_rank", DP),
    ("doubled_gradients_of_the_ring", RING),
    ("own_gradients_kept", RING),
    ("ring_over_the_wrong_group", {**RING, "tp": 2}),
    ("expert_gradients_summed_over_dp", {**MOE, "dp": 2, "ep": 2}),
    ("experts_summed_with_other_experts", {**HALF_EXPERTS, **ZERO1}),
    ("fsdp_divides_experts", {**HALF_EXPERTS, **FSDP}),
    ("chunks_of_experts_in_a_row", {**THREE_EXPERTS, **ZERO2}),
    ("own_chunk_of_experts_stays_old", {**THREE_EXPERTS, **ZERO1}),
    ("latent_weights_not_summed", {**LATENT, "tp": 2, "strategy.tensor.sequence_parallel": True}),
    ("gradients_of_first_factors_not_summed", {**ADAPTED, "tp": 2}),
    ("products_of_first_factors_not_summed", {**ADAPTED, "tp": 2}),
    ("adapters_summed_with_row_products", {**ADAPTED, "tp": 2}),
    ("input_gradient_not_summed_apart", {**TP, "strategy.tensor.overlap": False}),
    ("input_gradient_summed_twice", TP),
    ("output_averaged", TP),
    ("target_counted_by_every_rank", TP),
    ("largest_logit_of_the_shard", TP),
    ("tokens_of_other_shards_not_masked", TP),
    ("positions_of_the_first_slice", SEQUENCE),
    ("mask_of_the_first_slice", {**SEQUENCE, "dropout": 0.2}),
    ("slices_of_norm_gradients_not_summed", SEQUENCE),
    ("gradients_of_head_norms_not_summed", {**llama(model__qk_norm="head"), "tp": 2}),
    ("columns_of_head_norms_not_summed", {**llama(model__qk_norm="head"), **COLUMNS}),
    ("norm_of_own_heads", {**llama(model__qk_norm="all"), "tp": 2}),
    ("norm_gradient_of_own_heads", {**llama(model__qk_norm="all"), "tp": 2}),
    ("entered_without_summing_gradients", ROUTED),
    ("left_without_summing", ROUTED),
    ("auxiliary_loss_of_every_rank", ROUTED),
    ("router_gradients_not_summed", SPANS),
    ("rows_dispatched_by_every_rank_of_tp", SPANS),
    ("expert_gradients_summed_over_tp", SLICES),
    ("expert_gradients_not_summed", COPIES),
    ("slice_of_another_rank", SPANS),
    ("gradients_of_gathered_results_summed", SPANS),
    ("gradients_of_slices_not_gathered", SPANS),
    ("jitter_of_the_first_slice", {**SLICES, "model.router.jitter": 0.1}),
    ("routing_groups_of_own_tokens", SPANS),
    ("depth_not_summed", {**GRID, **DEEP}),
    ("rows_of_norms_not_summed", GRID_ROWS),
    ("positions_not_summed", GRID_ROWS),
    ("wrong_scatter_axis", {**GRID, **CUBE}),
    ("norm_of_own_features", GRID_COLUMNS),
    ("norm_gradient_of_own_features", GRID_COLUMNS),
    ("loss_of_the_first_row_counted", GRID_ROWS),
    ("loss_of_every_column_counted", GRID_COLUMNS),
    ("targets_of_the_first_samples", GRID_ROWS),
    ("tokens_of_the_first_samples", GRID_ROWS),
    ("masks_of_the_first_samples", {**GRID_ROWS, **DROPS}),
    ("masks_of_the_first_heads", {**GRID_COLUMNS, "model.attention_dropout": 0.1}),
    ("inside_taken_for_outside", {**GRID, **SQUARE, **form("stationary_w"), "model.attention_dropout": 0.1}),
    ("padding_taken_for_tokens", GRID_COLUMNS),
    ("rows_of_experts_not_summed", GRID_EXPERTS),
    ("columns_of_routers_not_summed", {**GRID_EXPERTS, **COLUMNS}),
    ("routers_of_the_first_samples", {**GRID_EXPERTS, "model.router.jitter": 0.1}),
    ("auxiliary_loss_divided_by_all_of_tp", GRID_EXPERTS),
    ("load_of_the_first_row", {**GRID_EXPERTS, **BIASED}),
    ("columns_of_latent_norms_not_summed", {**GRID_LATENT, **COLUMNS}),
    ("columns_of_latent_weights_not_summed", {**GRID_LATENT, **SQUARE}),
    ("slices_exchanged_once", {**GRID_EXPERTS, **COLUMNS, "ep": 2, "strategy.expert.tp": 1}),
    ("vocabulary_cut_by_rows_first", GRID_ROWS),
    ("log_sum_exp_of_the_last_block", CP),
    ("positions_begin_at_zero", {**CP, **llama()}),
    ("tokens_in_another_order", CP),
    ("gradients_of_keys_stay", CP),
    ("dropout_of_local_positions", {**CP, "dropout": 0.1}),
    ("window_of_one_key_more", {**CP, **llama(model__window=3)}),
    ("tokens_ahead_of_the_own_part", {**CP, **objectives.AHEAD, **ONE_LAYER}),
    ("z_loss_of_the_shard", {**TP, **objectives.Z_LOSS, **ONE_LAYER}),
    ("chunks_without_the_cap", {**CHUNKED, **objectives.CAP, **ONE_LAYER}),
    ("latent_weights_not_summed", {**SEQUENCE, **objectives.GATED, **ONE_LAYER}),
    ("sinks_of_every_block", {**CP, **SINKS}),
    ("sinks_of_the_first_heads", {**CP, **SINKS, context.KIND: "ulysses"}),
    ("sinks_summed_over_tp", {**SINKS, "tp": 2}),
    ("last_biases_of_every_rank", {**heads.GPT_OSS, "model.layers": 1, "tp": 2}),
    ("cap_behind_the_mask", {**CP, **llama(model__attention_softcap=2.0)}),
    ("windows_of_the_next_layers", {**heads.ALTERNATING, "pp": 2}),
    ("stripes_see_their_own_index", {**CP, context.ORDER: "striped"}),
    ("orthogonal_shards", {**MUON, **ONE_LAYER, "tp": 2}),
    ("rate_of_the_shard", {**MUON, **ONE_LAYER, "tp": 2}),
]

# What the full matrix adds: the same mutant in another plan. expert_gradients_ep_times_too_large: test_data_experts.py.
AGAIN: list[tuple[str, Overrides]] = [
    ("dropped_gradient_reduce", CP),
    ("untied_embedding", {**STAGED, "model.arguments": Arguments(tied=True)}),
    ("untied_embedding", {**PP, **objectives.AHEAD}),
    ("local_count", {**CP, **context.BERT}),
    ("expert_gradients_not_summed", HALF_EXPERTS),
    ("expert_gradients_ep_times_too_large", {**HALF_EXPERTS, **FSDP}),
    ("experts_summed_with_other_experts", {**HALF_EXPERTS, **ZERO2}),
    ("initial_weights_by_rank", {**ADAPTED, "dp": 2}),
    ("slices_of_norm_gradients_not_summed", {**llama(), "tp": 4}),  # of copied kv heads
    ("router_gradients_not_summed", ROUTED),
    ("router_gradients_not_summed", SLICES),
    ("expert_gradients_summed_over_tp", SPANS),
    ("expert_gradients_ep_times_too_large", COPIES),
    ("auxiliary_loss_of_every_rank", SPANS),
    ("routing_groups_of_own_tokens", {**CP, **context.DROPLESS}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "overrides"), [*PLANTED, *(AGAIN if FULL else ())], ids=str)
def test_a_planted_bug_is_caught_by_the_verdict(mutant: str, overrides: Overrides) -> None:
    document = parity(overrides, mutant)  # a crash would prove nothing about the comparison
    largest = max(document["max_error"].values())
    assert not document["passed"] or (document["reports_only"] and largest > 1e3 * document["tolerance"])


SOUND = [SEQUENCE, ROUTED, COPIES, {**GRID_ROWS, **DROPS}, {**GRID_COLUMNS, **DROPS}]
SOUND += [DP, TP, PP, DATA_FSDP, BOTH, SPANS] if FULL else []  # else as in test_parity.py and test_expert_spans_tp.py


@pytest.mark.parametrize("overrides", [*SOUND, {**GRID_EXPERTS, **BIASED, "model.router.jitter": 0.1}], ids=str)
def test_the_same_plan_without_a_bug_passes(overrides: Overrides) -> None:
    assert_equal(parity(overrides))  # the other plans: cells of the parity tests


def test_every_mutant_is_planted() -> None:
    mutants = {name for module in MODULES for name, function in getmembers(module, isfunction)
               if function.__module__ == module.__name__ and not name.startswith("_")}  # fmt: skip
    # test_hugging_face.py, which needs transformers; test_data_experts.py
    elsewhere = {"weights_of_other_choices", "expert_gradients_ep_times_too_large"}
    assert mutants == {name for name, _ in PLANTED} | elsewhere
