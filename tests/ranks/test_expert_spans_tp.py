"""ep over dp x tp: complete experts on every rank, whose tp groups divide the tokens, train as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity

EXPERTS: dict[str, Any] = {
    "model.experts": 8, "model.expert_period": 2, "model.router.capacity_factor": 1.25, "optimizer.clip": 0.05,
    "strategy.expert.tp": 1, "strategy.expert.kind": "dropless",
}  # fmt: skip
CAPACITY = {"strategy.expert.kind": "capacity"}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
ALL, ONE = {"dp": 2, "tp": 2, "ep": 4}, {"tp": 2, "ep": 2}
COPIES = {"dp": 2, "tp": 2, "ep": 2}
SHARED = {"model.shared_experts": 1}
KIND = "strategy.data.kind"
ROUTER = {"model.router.aux_coefficient": 0.3, "model.router.z_coefficient": 0.01}
EVERY = {"model.layers": 2, "model.expert_period": 1}


def pipeline(kind: str) -> dict[str, Any]:
    return {"pp": 2, "model.layers": 4, "global_batch": 8, "micro_batch": 2, "strategy.pipeline.kind": kind}


CELLS: dict[str, dict[str, Any]] = {
    "dropless": {**ALL, **ROUTER},
    "dropless, sequence": {**ALL, **SEQUENCE, **ROUTER, **SHARED},
    "capacity": {**ALL, **CAPACITY, **SHARED},
    "capacity, sequence, one replica": {**ONE, **CAPACITY, **SEQUENCE},
    "capacity, copies of experts": {**COPIES, **CAPACITY, "micro_batch": 2, "strategy.expert.chunks": 2},
    "dropless, two levels": {**ALL, "strategy.expert.group_size": 2},
    "capacity, two levels, cp": {"cp": 2, **ALL, **CAPACITY, "ep": 8, "strategy.expert.group_size": 4},
    "dropless, cp, sequence": {"cp": 2, "tp": 2, "ep": 4, **SEQUENCE, "model.router.jitter": 0.1},
    "dropless, more ranks than kv heads": {"tp": 4, "ep": 4, "model.kv_heads": 2, "model.bias": False},
    "dropless, zero bubble, sequence": {**ONE, **SEQUENCE, **pipeline("zero_bubble"), **SHARED, **EVERY},
    "capacity, interleaved": {**ONE, **pipeline("interleaved"), **CAPACITY},
    "dropless, recomputed, dropout": {**ONE, "recompute": "full", "dropout": 0.1, **SHARED},
    "capacity, recomputed, sequence": {**ONE, **CAPACITY, **SEQUENCE, "recompute": "full", **SHARED},
    "dropless, no limit, selective": {
        **ONE,
        "recompute": "selective",
        "model.activation": "swiglu",
        "model.router.capacity_factor": None,
    },
    "zero1": {**COPIES, KIND: "zero1"},
    "zero1, no copies of experts": {**ALL, **SEQUENCE, KIND: "zero1", "microbatches": 2},
    "zero2": {**TWO_STEPS, **COPIES, KIND: "zero2", "microbatches": 2},
    "fsdp": {**COPIES, KIND: "fsdp", **SEQUENCE},
    "fsdp, no copies of experts": {**ALL, KIND: "fsdp", "recompute": "full"},
    "hsdp": {"dp": 4, "tp": 2, "ep": 4, KIND: "fsdp", "strategy.data.shard": 2},
    "ring": {**COPIES, KIND: "ring", "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2},
    "gshard": {**ONE, "model.router.kind": "gshard", "model.router.second_expert": "random", "model.router.top_k": 2},
    "expert choice": {**ONE, "model.router.kind": "expert_choice", **SEQUENCE},
    "bias": {
        **TWO_STEPS,
        **COPIES,
        "model.router.score": "sigmoid",
        "model.router.bias_rate": 0.01,
        "model.router.top_k": 3,
    },
}


# What the full matrix adds: of data strategies what test_data_experts.py has, and further ranks of what others have.
FULL_MATRIX = (
    "dropless",
    "capacity, two levels, cp",
    "zero1, no copies of experts",
    "fsdp, no copies of experts",
    "hsdp",
)


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_training_is_that_of_one_device_and_sends_what_was_predicted(cell):
    assert_equal(parity({**EXPERTS, **CELLS[cell]}))
