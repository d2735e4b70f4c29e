"""Options of plain attention that published models have train on several ranks as on one device, and send what is
predicted: heads of a size of their own, norms of heads, of all heads and of results, biases of queries, keys and values
alone, windows, sinks, soft caps, and what else gpt-oss and Gemma are made of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity
from tests.plans import llama

SEQUENCE_PARALLEL = {"strategy.tensor.sequence_parallel": True}
FSDP = {"strategy.data.kind": "fsdp"}
PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 2, **FSDP},
    "tp, sequence parallel": {"tp": 2, **SEQUENCE_PARALLEL},
    "tp, more ranks than kv heads": {"tp": 4, "model.kv_heads": 2},
    "2d": {"tp": 4, "layout": "2d"},
    "2.5d": {"tp": 8, "layout": "2.5d", "global_batch": 16},
    "3d": {"tp": 8, "layout": "3d", "global_batch": 16, **({} if FULL else {"model.layers": 1})},
    "cp, ring": {"cp": 2},
    "cp, ulysses, tp": {"cp": 2, "tp": 2, "strategy.context.kind": "ulysses", "model.kv_heads": 4},
    "tp, pp": {"pp": 2, "tp": 2},
    "selective, tp": {"tp": 2, "recompute": "selective"},
}
WIDE = llama(model__head_dim=6)


@pytest.mark.parametrize("plan", ["tp, more ranks than kv heads", "cp, ulysses, tp"])
def test_heads_of_a_size_of_their_own(plan: str) -> None:
    assert_equal(parity({**WIDE, **PLANS[plan]}))


NORMED = WIDE | {"model.qk_norm": "head", "model.qkv_bias": True}
EXPERTS: dict[str, Any] = {
    "model.experts": 4, "model.expert_period": 1, "model.expert_ffn": 12, "model.own_router": True, "dp": 2, "ep": 2,
}  # fmt: skip


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan not in ("fsdp", "2.5d", "cp, ulysses, tp")])
def test_norms_of_heads_and_biases_of_their_projections(plan: str) -> None:
    assert_equal(parity({**NORMED, **PLANS[plan]}))


# Of one layout the first cells, of the other these; the full matrix has the layout of three axes and stages here, too.
ELSEWHERE = (
    "3d",
    "cp, ring",
    "selective, tp",
    *(("2d",) if FULL else ("2.5d", "tp, pp", "tp, more ranks than kv heads")),
)
OLMO = llama(model__qk_norm="all", model__norm_position="post")


@pytest.mark.parametrize("plan", shared(plan for plan in PLANS if plan not in ELSEWHERE))
def test_norms_of_all_heads_together_and_of_results(plan: str) -> None:
    assert_equal(parity({**OLMO, **PLANS[plan]}))


@pytest.mark.parametrize("more", [EXPERTS, EXPERTS | {"tp": 2}], ids=["ep", "ep, tp"])
def test_norms_of_heads_beside_experts(more: dict[str, Any]) -> None:
    assert_equal(parity({**NORMED, **more}))


def test_layernorms_of_heads_with_biases_and_learned_positions() -> None:
    assert_equal(parity({"model.qk_norm": "head", "tp": 2, "grid": "1x2", "layout": "2d"}))


WINDOW = llama(model__window=5, model__seq=24)
ORDER, CONTEXT = "strategy.context.order", "strategy.context.kind"
OVER_CONTEXT: dict[str, dict[str, Any]] = {
    "contiguous": {"cp": 2, ORDER: "contiguous"},
    "zigzag": {"cp": 3, ORDER: "zigzag"},
    "striped": {"cp": 2, ORDER: "striped"},
    "a window below a stripe": {"cp": 4, ORDER: "striped", "model.window": 1},
    "allgather, dropped probabilities": {"cp": 2, CONTEXT: "allgather", "model.attention_dropout": 0.2},
    "ulysses": {"cp": 2, CONTEXT: "ulysses"},
    "usp": {"cp": 4, CONTEXT: "usp", "model.heads": 4, "strategy.context.ulysses": 2},
    "packed documents, striped": {"cp": 2, "dataset.pack": True},
    "packed documents, contiguous": {"cp": 2, "dataset.pack": True, ORDER: "contiguous", "model.window": 2},
}
WINDOWED = OVER_CONTEXT | {name: PLANS[name] for name in ("tp, sequence parallel", "2d", "selective, tp")} | {
    "packed documents": {"dp": 2, "dataset.pack": True},
    "packed documents, 2d, dropped probabilities": {
        "tp": 4, "layout": "2d", "dataset.pack": True, "model.attention_dropout": 0.2
    },
    "several parts of the sequence": {"dp": 2, "model.seq": 300, "model.window": 130, "global_batch": 4},
    "full": {"dp": 2, "recompute": "full"},
}  # fmt: skip


FULL_MATRIX = ("2d", "packed documents, contiguous", "zigzag", "ulysses")  # others have the layout, and the order


@pytest.mark.parametrize("plan", shared(plan for plan in WINDOWED if FULL or plan not in FULL_MATRIX))
def test_windows(plan: str) -> None:
    assert_equal(parity({**WINDOW, **WINDOWED[plan]}))


ALTERNATING = llama(model__window=5, model__seq=24, model__global_period=2)
GEMMA = ALTERNATING | {
    "model.qk_norm": "head", "model.norm_position": "both", "model.activation": "geglu", "model.local_rope_theta": 10.0,
    "model.scaled_embedding": True, "model.query_pre_attn_scalar": 3.0, "model.attention_softcap": 2.0,
    "model.logit_softcap": 1.5,
}  # fmt: skip
GPT_OSS = ALTERNATING | EXPERTS | {
    "model.sinks": True, "model.activation": "swiglu_clamped", "model.bias": True, "model.expert_bias": True,
    "model.init_std": 0.3, "dp": 1, "ep": 1,
}  # fmt: skip
DROPPED = {"model.attention_dropout": 0.2}
MORE = OVER_CONTEXT | PLANS | {
    "packed documents, dropped probabilities": {"dp": 2, "dataset.pack": True, **DROPPED},
    "full": {"dp": 2, "recompute": "full"},
    "zero bubble, cp": {"pp": 2, "cp": 2, "strategy.pipeline.kind": "zero_bubble"},
}  # fmt: skip
OF_EXPERTS = {
    "ep, tp": {"dp": 2, "ep": 2, "tp": 2},
    "ep over tp, 2d": {"tp": 4, "layout": "2d", "ep": 4, "strategy.expert.tp": 1},
    "cp, ep": {"cp": 2, "ep": 2},
}
OF_GEMMA, OF_GPT_OSS = ("zigzag",), ("cp, ulysses, tp", "ep, tp")  # others: the full matrix


@pytest.mark.parametrize("plan", [plan for plan in MORE if FULL or plan in OF_GEMMA])
def test_the_parts_of_gemma(plan: str) -> None:
    assert_equal(parity({**GEMMA, **MORE[plan]}))


@pytest.mark.parametrize("plan", [plan for plan in MORE | OF_EXPERTS if FULL or plan in OF_GPT_OSS])
def test_the_parts_of_gpt_oss(plan: str) -> None:
    assert_equal(parity({**GPT_OSS, **(MORE | OF_EXPERTS)[plan]}))
