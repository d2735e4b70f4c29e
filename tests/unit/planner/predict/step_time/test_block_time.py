"""Of one block of a model, each of several ranks computes and moves its share, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.stack import OURS
from tests.unit.config.test_presets import plan as planned
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, RATES

# Without what a rank spends on a kernel or a collective whatever its size.
LINEAR = replace(
    RATES, product_ramp=0.0, multiprocessors=0, kernel_s=0.0, operation_s=0.0, collective_s=0.0, hop_s=0.0,
    message_s=0.0,
)  # fmt: skip
MODELS = {
    "gpt": ("model=gpt3_13b", "model.hidden=4096", "model.heads=32"),
    "llama": ("model=llama3_8b",),
    "latent": ("model=deepseek_v2_lite",),  # with experts
    "experts": ("model=mixtral_8x7b",),
}
ROUNDED = 6  # bytes moved for a weight in each pass: it is rounded from fp32 to bf16, its gradient back


def block_parts(model: str, *words: str):
    """(the last block, its time by part, forward and backward), of a microbatch of two samples."""
    plan = planned(*MODELS[model], *words, "model.layers=2", "precision=bf16", "micro_batch=2", "device=cuda")
    block = plan.spec.blocks[-2]
    time = blocks.block_time(block, plan, CLUSTER, LINEAR, OURS)
    return block, [{name: way[name] for name in (blocks.PRODUCTS, blocks.ATTENTION, blocks.MEMORY_BOUND)}
                   for way in (time.forward, time.backward)]  # fmt: skip


def rounding_s(block, role: str = "") -> float:
    """Seconds of all matrices of the block, or of those of a role."""
    own = [one for one in block.parameters if len(one.shape) > 1 and one.layer_role not in ("router", "shared_gate")]
    return ROUNDED * sum(one.numel for one in own if role in ("", one.layer_role)) / LINEAR.memory_bytes_s


@pytest.mark.parametrize("model", MODELS)
def test_two_tensor_parallel_ranks_do_half_of_a_block_each(model):
    """But for latent attention's: each rank turns the key of all heads, and rounds the weights that give latents."""
    block, alone = block_parts(model, "strategy=single", "global_batch=2")
    words = "strategy=ptdp", "tp=2", "strategy.tensor.sequence_parallel=true", "global_batch=2"
    key = 2 * 4096 * 64 / LINEAR.memory_bytes_s if model == "latent" else 0.0  # of two samples, 64 features
    for whole, half, moved in zip(alone, block_parts(model, *words)[1], (19, 32)):  # bytes to turn a number
        for name, seconds in whole.items():
            twice = moved * key + rounding_s(block, "linear") if name == blocks.MEMORY_BOUND else 0.0
            assert 2 * half[name] == pytest.approx(seconds + twice, rel=1e-9), name


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_of_a_sequence_do_half_of_a_block_each_but_for_its_weights(model):
    block, alone = block_parts(model, "strategy=single", "global_batch=2")
    for whole, half in zip(alone, block_parts(model, "strategy=ptdp", "cp=2", "global_batch=2")[1]):
        for name, seconds in whole.items():
            weights = rounding_s(block) if name == blocks.MEMORY_BOUND else 0.0
            assert 2 * half[name] - weights == pytest.approx(seconds, rel=1e-3), name


@pytest.mark.parametrize("model", ["latent", "experts"])
def test_a_rank_with_half_of_the_experts_computes_as_much_and_rounds_half_of_their_weights(model):
    block, alone = block_parts(model, "strategy=single", "global_batch=2")
    for whole, half in zip(alone, block_parts(model, "strategy=ptdp", "dp=2", "ep=2", "global_batch=4")[1]):
        for name, seconds in whole.items():
            saved = rounding_s(block, "expert") / 2 if name == blocks.MEMORY_BOUND else 0.0
            assert half[name] + saved == pytest.approx(seconds, rel=1e-9), name


def test_scores_multiply_queries_and_values_each_by_their_own_width():
    """DeepSeek-V2-Lite: 16 heads, whose queries have 128 + 64 features and whose values have 128."""
    assert planned("model=deepseek_v2_lite", "strategy=single").spec.attention_features == 16 * (128 + 64) + 16 * 128
