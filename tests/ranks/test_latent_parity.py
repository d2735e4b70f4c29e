"""Latent attention and routing limited to groups of experts train on several ranks as on one device, and send what is
predicted."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from parallelrun.strategies.tensor.megatron.layers import ParallelSharedInput
from parallelrun.training.loop.build import Training
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity

LATENT: dict[str, Any] = {
    "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope", "model.bias": False,
    "model.tied_embeddings": False, "model.kv_lora_rank": 12, "model.q_lora_rank": 20, "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4, "model.v_head_dim": 8, "model.rope_scaling": "yarn", "model.rope_factor": 4.0,
    "model.rope_original_seq": 16, "model.rope_mscale_all_dim": 1.0, "global_batch": 16,
}  # fmt: skip
# DeepSeek-V3's own class: a first dense layer, groups of experts, a shared expert, balanced by bias.
EXPERTS: dict[str, Any] = LATENT | {
    "model.experts": 8, "model.expert_ffn": 16, "model.expert_period": 1, "model.dense_layers": 1,
    "model.shared_experts": 1, "model.router.top_k": 3, "model.router.score": "sigmoid", "model.router.scaling": 2.5,
    "model.router.bias_rate": 0.01, "model.router.n_group": 4, "model.router.topk_group": 2, "model.own_router": True,
}  # fmt: skip
PLAIN_QUERIES = {"model.q_lora_rank": None}
SEQUENCE_PARALLEL = {"strategy.tensor.sequence_parallel": True}
FSDP = {"strategy.data.kind": "fsdp"}
CELLS: dict[str, dict[str, Any]] = {
    "ddp": {**LATENT, "dp": 2},
    "fsdp, biases, layernorm": {**LATENT, "dp": 2, **FSDP, "model.bias": True, "model.norm": "layernorm"},
    "tp, dropout": {**LATENT, "tp": 2, "dropout": 0.2, "model.attention_dropout": 0.1},
    "tp, sequence parallel": {**LATENT, "tp": 2, **SEQUENCE_PARALLEL, "model.bias": True},
    "tp, sequence parallel, queries of x": {**LATENT, **PLAIN_QUERIES, "tp": 2, **SEQUENCE_PARALLEL},
    "tp, queries of x, recompute selective": {**LATENT, **PLAIN_QUERIES, "tp": 2, "recompute": "selective"},
    "zero bubble, tp": {**LATENT, "pp": 2, "tp": 2, "strategy.pipeline.kind": "zero_bubble"},
    "tp, pp with experts": {**EXPERTS, "tp": 2, "pp": 2, "recompute": "full"},
    "ptdp with experts": {**EXPERTS, "dp": 2, "tp": 2, "pp": 2, "recompute": "full"},
    "interleaved": {**LATENT, "pp": 2, "strategy.pipeline.kind": "interleaved", "model.layers": 4},
    "packed documents, tp": {**LATENT, "tp": 2, "dataset.pack": True, "model.seq": 16},
    "cp, ring, tp with sequence parallel": {**LATENT, "cp": 2, "tp": 2, **SEQUENCE_PARALLEL},
    "cp, ulysses, queries of x": {**LATENT, **PLAIN_QUERIES, "cp": 2, "strategy.context.kind": "ulysses"},
    "2d, queries of x, biases": {**LATENT, **PLAIN_QUERIES, "tp": 4, "layout": "2d", "model.bias": True},
    "3d": {**LATENT, "model.q_lora_rank": 24, "tp": 8, "layout": "3d", "recompute": "full"},
    "2.5d with experts": {**EXPERTS, "model.q_lora_rank": 24, "tp": 8, "layout": "2.5d", "model.layers": 2},
    "2d, zbv": {**LATENT, "tp": 4, "layout": "2d", "pp": 2, "strategy.pipeline.kind": "zbv", "model.layers": 4},
    "experts, ep": {**EXPERTS, "dp": 2, "ep": 2, "model.layers": 2},
}
FULL_MATRIX = (
    "tp, queries of x, recompute selective", "zero bubble, tp", "cp, ulysses, queries of x", "3d", "2.5d with experts",
    "2d, zbv", "ptdp with experts",
)  # fmt: skip


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_latent_attention_under_a_plan_equals_one_device(cell: str) -> None:
    assert_equal(parity(CELLS[cell]))


def shared_key_alone(training: Training) -> None:
    """Every rank keeps the gradient that its own heads give the key they share."""

    def forward(x: Tensor) -> Tensor:
        return x

    for module in (one for part in training.model_parts for one in part.modules()):
        if isinstance(module, ParallelSharedInput):
            module.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("more", [{}, PLAIN_QUERIES], ids=["latent queries", "queries of x"])
def test_a_shared_key_whose_gradient_is_not_summed_is_noticed(more: dict[str, Any]) -> None:
    # In the second step the weight's own gradient is the worst, no longer that of the norm before it.
    document = parity({**LATENT, **more, "tp": 2, "verify.steps": 2}, fault=shared_key_alone)
    assert not document["passed"] and "kv_a" in str(document["worst"]), document["worst"]
