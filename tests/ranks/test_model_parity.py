"""Models on several ranks train as on one device: dropout by hash, recomputation, the mlp, bert, a user's module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.plans import llama


class Frozen(dict[str, Any]):
    """A mapping that can be part of a cache's key."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


NET = Path(__file__).parents[1] / "unit" / "user_net.py"
LLAMA = llama()
DROPOUT = {"dropout": 0.2, "model.attention_dropout": 0.1}
SEQUENCE_PARALLEL = {"strategy.tensor.sequence_parallel": True}
FSDP = {"strategy.data.kind": "fsdp"}
MLP = {"model.name": "mlp", "model.preset": "mlp"}
BERT = {"model.name": "bert", "model.preset": "bert", "model.layers": 2, "dataset.samples": 64, "global_batch": 8}
HEAD_BIAS = {"model.head_bias": True}
TEXT = {"dataset.name": "pystdlib", "dataset.vocab": None, "model.vocab": None}
MODULE = {"model.name": "module", "model.preset": "module", "model.source": f"{NET}:build", **TEXT}
ROLES = Frozen(
    {
        "embed.tokens": "embedding",
        "layers.*.norm?": "norm",
        "layers.*.[qkv]": "column_parallel",
        "layers.*.out": "row_parallel",
        "layers.*.fc1": "column_parallel",
        "layers.*.fc2": "row_parallel",
        "head": "head",
    }
)
PLACED = {**MODULE, "model.roles": ROLES, "model.blocks": ("embed", "layers.*", "head")}
SLICED = {**PLACED, "model.source": f"{NET}:build_sliceable", **SEQUENCE_PARALLEL}
TWO_TABLES = {**MODULE, "model.source": f"{NET}:build_two_tables", "optimizer.clip": 0.05}
CELLS: dict[str, dict[str, Any]] = {
    "dropout, tp": {"tp": 2, **DROPOUT},
    "dropout, tp, sequence parallel": {"tp": 2, **DROPOUT, **SEQUENCE_PARALLEL},
    "dropout, dp and pp, recompute full": {**TWO_STEPS, "dp": 2, "pp": 2, **DROPOUT, "recompute": "full"},
    "recompute full, fsdp and tp": {"dp": 2, "tp": 2, **LLAMA, **FSDP, "recompute": "full", **SEQUENCE_PARALLEL},
    "recompute selective, fsdp": {"dp": 2, **FSDP, "recompute": "selective", **DROPOUT},
    "recompute selective, zero bubble": {"pp": 2, "strategy.pipeline.kind": "zero_bubble", "recompute": "selective"},
    "mlp on features": {"dp": 2, "tp": 2, **MLP, "dropout": 0.2},
    "mlp on text": {"tp": 2, "pp": 2, **MLP, **TEXT, **SEQUENCE_PARALLEL, "recompute": "full"},
    "module, two embeddings, one of three rows": {
        "tp": 4,
        **PLACED,
        "model.source": f"{NET}:build_two_tables",
        "model.roles": Frozen({**ROLES, "embed.kinds": "embedding"}),
    },
    "module, a weight without dims, zero2": {"dp": 2, **TWO_TABLES, "strategy.data.kind": "zero2"},
    "module, a weight without dims, fsdp in a pipeline": {
        "dp": 2, "pp": 2, "microbatches": 2, **TWO_TABLES, **FSDP, "model.blocks": PLACED["model.blocks"],
    },
    "module, ddp, nothing said": {"dp": 2, **MODULE},
    "module, fsdp, nothing said": {"dp": 2, **MODULE, **FSDP, "model.arguments": Frozen({"tied": True})},
    "module, tied, tp": {
        "tp": 2,
        **PLACED,
        "model.arguments": Frozen({"tied": True, "dropout": 0.2}),
        "recompute": "full",  # its own dropout's mask comes after the last sum
    },
    "module, sequence parallel, zero1": {
        "tp": 2,
        "dp": 2,
        **SLICED,
        "strategy.data.kind": "zero1",
        "recompute": "full",
    },
    "module, sequence parallel, zero bubble": {
        "tp": 2, "pp": 2, **SLICED, "strategy.pipeline.kind": "zero_bubble",
        "model.arguments": Frozen({"dropout": 0.2}),
    },
    "module, dropout on split columns": {
        "tp": 2,
        **SLICED,
        "model.arguments": Frozen({"dropout": 0.2}),
        "strategy.tensor.sequence_parallel": False,
    },
    "module, tied, pp": {"pp": 2, **PLACED, "model.arguments": Frozen({"tied": True}), "recompute": "full"},
    # Masked targets are counted over all replicas, and both halves of a tied weight agree.
    "bert, tp, uneven vocabulary": {
        **BERT, "tp": 2, "model.vocab": 37, "model.label_smoothing": 0.1, "recompute": "full", **HEAD_BIAS,
    },
    "bert, 1f1b and dp": {**BERT, "pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 2},
    "bert, zero bubble and tp": {
        **BERT, "tp": 2, "pp": 2, "schedule": "zero_bubble", "virtual_stages": 1, "microbatches": 2,
        **SEQUENCE_PARALLEL, **HEAD_BIAS,
    },
    "bert, fsdp and tp": {**BERT, "dp": 2, "tp": 2, **FSDP, **HEAD_BIAS},
}  # fmt: skip
if FULL:
    CELLS["module, a weight without dims, hsdp"] = {"dp": 4, **TWO_TABLES, **FSDP, "strategy.data.shard": 2}
    CELLS["module, a weight without dims, zero1 of three"] = {
        "dp": 3, **TWO_TABLES, "strategy.data.kind": "zero1", "global_batch": 9,
    }  # fmt: skip
    CELLS["module, sequence parallel, pp, zero1"] = {**CELLS["module, sequence parallel, zero1"], "pp": 2}


# What the full matrix adds: each of its settings stands in another cell.
FULL_MATRIX = (
    "dropout, tp", "module, ddp, nothing said", "module, sequence parallel, zero1", "bert, fsdp and tp",
)  # fmt: skip
CHOSEN = {name: cell for name, cell in CELLS.items() if FULL or name not in FULL_MATRIX}


@pytest.mark.parametrize("overrides", shared(CHOSEN.values()), ids=CHOSEN)
def test_a_model_under_a_plan_equals_one_device(overrides: dict[str, Any]) -> None:
    assert_equal(parity({"global_batch": 16, **overrides}))
