"""Fine-tuning as on one device: a loss on answers, of which replicas have unequal numbers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.hugging_face_families import overrides
from tests.matrix import FULL, shared
from tests.parity import assert_equal, parity


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Conversations whose answers have 1 to 40 bytes."""
    folder = tmp_path_factory.mktemp("talks")
    rows = [{"prompt": f"question {index}", "response": "yes" * (index * 7 % 13) + "."} for index in range(60)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset.name": "chat", "dataset.path": str(folder / "talks.jsonl"), "dataset.cache": str(folder / "cache")}
    return {**data, "model.vocab": None, "model.seq": 64}


CELLS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "zero1, pp": {"dp": 2, "pp": 2, "strategy.data.kind": "zero1"},
    "tp, cp": {"tp": 2, "cp": 2},
    "ring": {"dp": 2, "strategy.data.kind": "ring"},
    "packed": {"dp": 2, "cp": 2, "dataset.pack": True, "model.seq": 128, "global_batch": 4},
}


@pytest.mark.parametrize("cell", shared(CELLS))
def test_answers_are_trained_as_on_one_device(talks: dict[str, Any], cell: str) -> None:
    assert_equal(parity({**talks, **CELLS[cell]}))


def test_a_mean_over_the_answers_of_each_replica_is_noticed(talks: dict[str, Any]) -> None:
    assert not parity({**talks, "dp": 2}, mutant="local_count")["passed"]


NET = Path(__file__).parents[1] / "unit" / "user_net.py"
ROLES = {
    "embed.tokens": "embedding", "layers.*.[qkv]": "column_parallel", "layers.*.out": "row_parallel",
    "layers.*.fc1": "column_parallel", "layers.*.fc2": "row_parallel", "head": "head",
}  # fmt: skip
MODULE: dict[str, Any] = {
    "model.name": "module", "model.preset": "module", "model.source": f"{NET}:build_sliceable", "model.roles": ROLES,
    "model.blocks": ["embed", "layers.*", "head"], "global_batch": 16,
}  # fmt: skip
LORA = {
    "model.lora.rank": 3,
    "model.lora.alpha": 6.0,
    "verify.steps": 2,
}  # the first factors have no gradient in the first step
ADAPTED: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "zero1": {"dp": 2, "strategy.data.kind": "zero1"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "tp, pp": {"pp": 2, "tp": 2},
    "zero bubble, tp, recompute": {"pp": 2, "tp": 2, "schedule": "zero_bubble", "recompute": "full"},
    "fsdp, tp": {"dp": 2, "tp": 2, "strategy.data.kind": "fsdp"},
}


OF_MODULES: dict[str, dict[str, Any]] = {
    "tp, sequence": {"tp": 2, "strategy.tensor.sequence_parallel": True},
    "zero2, tp, pp": {"dp": 2, "tp": 2, "pp": 2, "strategy.data.kind": "zero2"},
    "head too, fsdp": {"dp": 2, "strategy.data.kind": "fsdp", "model.lora.targets": ["head", "fc*"]},
    "head too, tp": {"tp": 2, "model.lora.targets": ["head", "out"], "recompute": "full"},
}


BF16_BASE = {"model.lora.base_dtype": "bf16"}
PACKED: dict[str, dict[str, Any]] = {
    "gpt2, ddp": {"dp": 2},
    "gemma2, fsdp": {"dp": 2, "strategy.data.kind": "fsdp"},
    "llama, tp, pp, full": {"tp": 2, "pp": 2, "recompute": "full"},
    "qwen3, zero bubble": {"pp": 2, "schedule": "zero_bubble"},
}


@pytest.mark.extras
@pytest.mark.parametrize("cell", ["ddp", "fsdp", "zero1", "tp", "zero bubble, tp, recompute", "fsdp, tp"])
def test_adapters_of_a_base_in_bf16_are_trained_as_on_one_device(cell: str) -> None:
    pytest.importorskip("transformers")
    assert_equal(parity({**overrides("llama"), **LORA, **BF16_BASE, **ADAPTED[cell]}))


@pytest.mark.extras
def test_a_second_forward_rounds_the_weights_of_a_block_of_one_layer() -> None:
    pytest.importorskip("transformers")
    assert_equal(parity({**overrides("llama"), "dp": 2, "precision.name": "bf16", "recompute": "full"}))


@pytest.mark.extras
@pytest.mark.parametrize("cell", PACKED)
def test_packed_answers_train_a_model_of_transformers(talks: dict[str, Any], cell: str) -> None:
    pytest.importorskip("transformers")
    data = {**talks, "model.seq": 64, "dataset.pack": True, "global_batch": 4, "model.hf": {"vocab_size": 260}}
    assert_equal(parity({**overrides(cell.partition(",")[0]), **data, **PACKED[cell]}))


@pytest.mark.extras
@pytest.mark.parametrize("cell", ADAPTED)
def test_adapters_are_trained_as_on_one_device(cell: str) -> None:
    pytest.importorskip("transformers")
    assert_equal(parity({**overrides("llama"), **LORA, **ADAPTED[cell]}))


BASES = {"": {}, "bf16": BF16_BASE}
# tp of a base in another dtype, and of the head, stand in one cell each; the full matrix has all
ELSEWHERE = [("tp, sequence", "bf16"), ("head too, tp", "")]


@pytest.mark.parametrize(
    ("cell", "base"), [one for one in product(OF_MODULES, BASES) if FULL or one not in ELSEWHERE], ids=str
)
def test_adapters_of_a_users_module_are_trained_as_on_one_device(cell: str, base: str) -> None:
    more, fewer = BASES[base], {}
    if "pp" in OF_MODULES[cell]:  # other cells have tp over such a base
        fewer = {"tp": 1} if base else {} if FULL else {"dp": 1, "strategy.data.kind": "ddp"}
    assert_equal(parity({**MODULE, **LORA, **OF_MODULES[cell], **more, **fewer}))
