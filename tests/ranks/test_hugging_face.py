"""Models of transformers train under plans as on one device, by the classes' own tensor and pipeline plans."""

from __future__ import annotations

from typing import Any

import pytest

from tests import hugging_face_table as table
from tests.hugging_face_families import FAMILIES, overrides
from tests.parity import assert_equal, parity
from tests.plans import tiny_plan
from tests.pool import TRANSFORMERS, run_ranks
from tests.ranks.test_memory import peaks

pytest.importorskip("transformers")
pytestmark = pytest.mark.extras

WITH_PLANS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2",
    "deepseek_v3", "gpt_neox",
)  # fmt: skip
FOUR = {"num_hidden_layers": 4}
CELLS: dict[str, dict[str, Any]] = {
    "gpipe, fsdp": {"dp": 2, "pp": 2, "strategy.data.kind": "fsdp", "schedule": "gpipe"},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "model.hf": FOUR},
    "zero bubble, tp": {"pp": 2, "tp": 2, "schedule": "zero_bubble"},
    "interleaved, recompute": {
        "pp": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "recompute": "full",
        "model.hf": FOUR,
    },
    "zero bubble, recompute": {"pp": 2, "schedule": "zero_bubble", "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
    "zero1, recompute": {"dp": 2, "strategy.data.kind": "zero1", "recompute": "full"},
    "zero2": {"dp": 2, "strategy.data.kind": "zero2"},
    "local SGD": {"dp": 2, "strategy.data.kind": "local_sgd"},
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("mixtral", {}),
    "fsdp, two copies": ("deepseek_v3", {"dp": 4, "strategy.data.kind": "fsdp"}),
    "zero1, recompute": ("mixtral", {"dp": 4, "strategy.data.kind": "zero1", "recompute": "full"}),
    "tp": ("qwen3_moe", {"tp": 2}),
    "two levels": ("mixtral", {"dp": 4, "ep": 4, "strategy.expert.group_size": 2}),
    "interleaved, chunks": ("mixtral", {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "micro_batch": 2,
                                        "strategy.expert.chunks": 2, "model.hf": FOUR}),
    "zero bubble": ("deepseek_v3", {"pp": 2, "schedule": "zero_bubble"}),
}  # fmt: skip
CLASSES: dict[str, Any] = {
    "model.task": "sequence_classification", "dataset.vocab": 3, "model.hf": {"pad_token_id": 0},
}  # fmt: skip
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes of texts, zero1": ("bert", {**CLASSES, "strategy.data.kind": "zero1"}),
    "classes of texts, tp": ("llama", {**CLASSES, "tp": 2}),
    "source and target, recompute": ("t5", {"strategy.data.kind": "zero1", "recompute": "full"}),
}
# Sizes at which activations count, as in test_memory.
_WIDE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192,
    "max_position_embeddings": 128,
}  # fmt: skip
_GROUPED = {**_WIDE, "num_key_value_heads": 2, "head_dim": 16}
_T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 4, "num_heads": 4}
PEAKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", _GROUPED, {}),
    "llama, bf16": ("llama", _GROUPED, {"precision.name": "bf16"}),
    "llama, bf16, fsdp, recomputed": (
        "llama",
        _GROUPED,
        {"precision.name": "bf16", "recompute": "full", "dp": 2, "strategy.data.kind": "fsdp"},
    ),  # FSDP's hooks round the weights of a norm, in a second forward as well
    "bert": ("bert", _WIDE, {}),
    "gpt2": ("gpt2", {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_positions": 128}, {}),
    "t5": ("t5", _T5, {}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}, {}),
    "llama, tp": ("llama", _GROUPED, {"tp": 2}),
    "llama, fsdp": ("llama", _GROUPED, {"dp": 2, "strategy.data.kind": "fsdp"}),
    "llama, 1f1b": ("llama", _GROUPED, {"pp": 2, "schedule": "1f1b"}),
    "mixtral, ep": ("mixtral", {**_GROUPED, "num_local_experts": 4}, {"dp": 2, "ep": 2}),
    "mixtral, ep, tp": ("mixtral", {**_GROUPED, "num_local_experts": 4}, {"dp": 2, "ep": 2, "tp": 2}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_under_fsdp(family: str) -> None:
    assert_equal(parity({**overrides(family), "dp": 2, "strategy.data.kind": "fsdp"}))


@pytest.mark.parametrize("family", WITH_PLANS)
def test_families_with_plans_of_their_own_are_exact_under_tensor_and_pipeline_parallelism(family: str) -> None:
    """qwen3 and gemma3 have norms of heads, whose gradients are sums over the tensor-parallel ranks."""
    assert_equal(parity({**overrides(family), "tp": 2, "pp": 2}))


@pytest.mark.parametrize("cell", CELLS)
def test_llama_is_exact_under_other_plans(cell: str) -> None:
    assert_equal(parity({**overrides("llama"), **CELLS[cell]}))


@pytest.mark.parametrize("cell", EXPERTS)
def test_experts_on_several_ranks_are_exact(cell: str) -> None:
    family, plan = EXPERTS[cell]
    assert_equal(parity({**overrides(family), "dp": 2, "ep": 2, **plan}))


def test_weights_of_other_choices_are_seen() -> None:
    document = parity({**overrides("mixtral"), "dp": 2, "ep": 2}, mutant="weights_of_other_choices")
    assert not document["passed"] and document["max_error"]["loss"] > 1e-9


@pytest.mark.parametrize("cell", TEXTS)
def test_tasks_other_than_next_tokens_are_exact(cell: str) -> None:
    family, plan = TEXTS[cell]
    assert_equal(parity({**overrides(family), "dp": 2, **plan}))


@pytest.mark.parametrize("cell", PEAKS)
def test_the_predicted_peak_is_within_ten_percent_of_what_was_alive(cell: str) -> None:
    """With experts it depends on how evenly the tokens are routed: the plan predicts an even load."""
    family, sizes, plan = PEAKS[cell]
    batch = {"model.seq": 64, "dataset.vocab": 128, "global_batch": 8 * plan.get("dp", 1), "micro_batch": 4}
    case = {**overrides(family), "model.hf": sizes, "optimizer.name": "adamw", **batch, **plan}
    ranks = run_ranks(tiny_plan(case).world, peaks, [case], timeout=120, backend="gloo", imports=TRANSFORMERS)
    errors = [f"{predicted / measured - 1:+.1%}" for [(measured, predicted)] in ranks]
    assert all(abs(float(error.rstrip("%"))) < 10 for error in errors), errors


@pytest.mark.parametrize(
    "family, plan",
    [
        ("gpt2", "tp"),
        ("llama", "tp"),
        ("mixtral", "ep"),
        ("t5", "zero1"),
        ("vit", "ep"),
        ("bert", "pp"),
        ("falcon", "pp"),
        ("vit", "pp"),
        ("opt", "pp"),
    ],
)
def test_the_table_of_the_docs_says_what_training_says(family: str, plan: str) -> None:
    heads, *rows = (line.split() for line in table.table_in(table.PAGE.read_text()).splitlines())
    assert heads == list(table.PLANS) and [row[0] for row in rows] == list(FAMILIES)
    cells = {row[0]: dict(zip(heads, row[1:], strict=True)) for row in rows}
    assert all(each == table.REFUSED or float(each) < 1e-10 for row in cells.values() for each in row.values())
    found = table.cell(family, plan)
    assert found != "WRONG" and (found == table.REFUSED) == (cells[family][plan] == table.REFUSED)
