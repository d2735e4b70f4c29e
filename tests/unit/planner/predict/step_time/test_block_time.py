"""Of one block of a model, each of several ranks computes and moves its share, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.experts import ROW_BYTES
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
    given = "model.layers=2", "precision=bf16", "micro_batch=2", "device=cuda", "stack.expert_imbalance=1"
    plan = planned(*MODELS[model], *words, *given)
    block = plan.spec.blocks[-2]
    time = blocks.block_time(block, plan, CLUSTER, LINEAR)
    return block, [{name: way[name] for name in (blocks.PRODUCTS, blocks.ATTENTION, blocks.MEMORY_BOUND)}
                   for way in (time.forward, time.backward)]  # fmt: skip


def rounding_s(block, role: str = "") -> float:
    """Seconds of all matrices of the block, or of those of a role."""
    own = [one for one in block.parameters if len(one.shape) > 1 and one.layer_role not in ("router", "shared_gate")]
    return ROUNDED * sum(one.numel for one in own if role in ("", one.layer_role)) / LINEAR.memory_bytes_s


@pytest.mark.parametrize("model", MODELS)
def test_two_tensor_parallel_ranks_do_half_of_a_block_each(model):
    """But for latent attention's: each rank turns the key of all heads, and rounds the weights that give latents; and
    for routed rows, which each rank puts into the order of the experts."""
    block, alone = block_parts(model, "strategy=single", "global_batch=2")
    words = "strategy=ptdp", "tp=2", "strategy.tensor.sequence_parallel=true", "global_batch=2"
    key = 2 * 4096 * 64 / LINEAR.memory_bytes_s if model == "latent" else 0.0  # of two samples, 64 features
    router = planned(*MODELS[model], "strategy=single").spec.router
    routed = 2 * (4096 if model == "latent" else 32768) * router.top_k * block.layers[0].in_features if router else 0
    order = [routed * num_bytes / LINEAR.memory_bytes_s for num_bytes in ROW_BYTES]
    for whole, half, moved, ordering in zip(alone, block_parts(model, *words)[1], (19, 32), order):  # to turn a number
        for name, seconds in whole.items():
            twice = moved * key + rounding_s(block, "linear") + ordering if name == blocks.MEMORY_BOUND else 0.0
            assert 2 * half[name] == pytest.approx(seconds + twice, rel=1e-9), name


SHARES = [  # of two ranks: how they divide a block; its batch; the role of the weights that are rounded; their times
    *((model, "cp=2", 2, "", 2.0, -1.0) for model in MODELS),  # half of a block but for its weights
    *((model, "dp=2 ep=2", 4, "expert", 1.0, 0.5) for model in ("latent", "experts")),  # half of the experts' weights
]


@pytest.mark.parametrize(("model", "words", "batch", "role", "factor", "rounded"), SHARES)
def test_two_ranks_compute_their_shares_and_round_their_weights(model, words, batch, role, factor, rounded):
    block, alone = block_parts(model, "strategy=single", "global_batch=2")
    shares = block_parts(model, "strategy=ptdp", *words.split(), f"global_batch={batch}")[1]
    for whole, own in zip(alone, shares):
        for name, seconds in whole.items():
            weights = rounding_s(block, role) if name == blocks.MEMORY_BOUND else 0.0
            within = 1e-3 if words == "cp=2" else 1e-9
            assert factor * own[name] + rounded * weights == pytest.approx(seconds, rel=within), name


def test_scores_multiply_queries_and_values_each_by_their_own_width():
    """DeepSeek-V2-Lite: 16 heads, whose queries have 128 + 64 features and whose values have 128."""
    assert planned("model=deepseek_v2_lite", "strategy=single").spec.attention_features == 16 * (128 + 64) + 16 * 128
