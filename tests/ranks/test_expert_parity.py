"""Experts on several ranks train as on one device, and send what their plan says; bugs that people had are caught."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL as FULL_RUN
from tests.matrix import TWO_STEPS, shared
from tests.parity import assert_equal, parity

EXPERTS = {"model.experts": 8, "model.expert_period": 2, "model.router.capacity_factor": 1.25}
CAPACITY = {"strategy.expert.kind": "capacity"}
DROPLESS = {"strategy.expert.kind": "dropless"}
EP2, EP4 = {"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}
TWO_LEVELS = {**EP4, "strategy.expert.group_size": 2}
CHUNKS = {"micro_batch": 2, "strategy.expert.chunks": 2}
SHARED = {"model.shared_experts": 1}
EVERY = {"model.expert_period": 1}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}


def pipeline(kind: str) -> dict[str, Any]:
    return {"pp": 2, "model.layers": 4, "global_batch": 16, "micro_batch": 2, "strategy.pipeline.kind": kind}


def router(kind: str, **settings: Any) -> dict[str, Any]:
    return {"model.router.kind": kind, **{f"model.router.{key}": value for key, value in settings.items()}}


CELLS = {
    "capacity": {**EP4, **CAPACITY},
    "dropless": {**EP4, **DROPLESS},
    "dropless, no limit": {**EP2, **DROPLESS, "model.router.capacity_factor": None},
    "capacity, experts on two replicas": {"dp": 4, "ep": 2, **CAPACITY, **CHUNKS, **SHARED},
    "dropless, experts on two replicas": {"dp": 4, "ep": 2, **DROPLESS},
    "capacity, two levels": {**TWO_LEVELS, **CAPACITY, **CHUNKS},
    "dropless, two levels, recomputed": {**TWO_STEPS, **TWO_LEVELS, **DROPLESS, **CHUNKS, **FULL},
    "capacity, tp": {**EP2, "tp": 2, **CAPACITY},
    "dropless, tp, sequence": {**EP2, "tp": 2, **DROPLESS, "strategy.tensor.sequence_parallel": True},
    "capacity, 1f1b": {**EP2, **pipeline("1f1b"), **CAPACITY},
    "dropless, interleaved": {**EP2, **pipeline("interleaved"), **DROPLESS},
    "capacity, zero bubble": {**EP2, **pipeline("zero_bubble"), **CAPACITY, **CHUNKS, **SHARED},
    "dropless, zero bubble, recomputed": {**EP2, **pipeline("zero_bubble"), **DROPLESS, **FULL, **SHARED},
    "dropless, two passes in turns, tp": {**EP2, "tp": 2, **pipeline("dualpipev"), **DROPLESS, **EVERY},
    "capacity, two passes in turns, recomputed": {
        **EP2,
        **pipeline("dualpipev"),
        **CAPACITY,
        **CHUNKS,
        **SHARED,
        **EVERY,
        **FULL,
    },
    "dropless, zero bubble, tp": {**EP2, "tp": 2, **pipeline("zero_bubble"), **DROPLESS},
    "capacity, recomputed, dropout": {**EP2, **CAPACITY, **FULL, **SHARED, "dropout": 0.1},
    "capacity, selective": {**EP2, **CAPACITY, **SELECTIVE, **SHARED, "model.activation": "swiglu"},
    "dropless, selective, blocking": {**EP2, **DROPLESS, **SELECTIVE, **SHARED, "strategy.expert.overlap": False},
    "capacity, gshard": {**EP2, **CAPACITY, **router("gshard", second_expert="random", group_samples=2)},
    "dropless, gshard": {**EP2, **DROPLESS, **router("gshard", second_expert="random", drop_policy="probability")},
    "capacity, switch": {**TWO_STEPS, **EP2, **CAPACITY, **router("switch", top_k=1, jitter=0.01, z_coefficient=0.001)},
    "capacity, expert choice": {**EP2, **CAPACITY, **router("expert_choice")},
    "dropless, expert choice": {**EP2, **DROPLESS, **router("expert_choice")},
    "dropless, bias": {**TWO_STEPS, **EP2, **DROPLESS, **router("top_k", score="sigmoid", bias_rate=0.01, top_k=3)},
}
# What the full matrix adds: the same with the other dispatcher, or schedule.
FULL_MATRIX = (
    "dropless, experts on two replicas", "capacity, two levels", "dropless, zero bubble, tp",
    "capacity, two passes in turns, recomputed",
    "capacity, expert choice", "dropless, interleaved", "dropless", "capacity, 1f1b",
)  # fmt: skip


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL_RUN or cell not in FULL_MATRIX))
def test_training_is_that_of_one_device_and_sends_what_was_predicted(cell):
    assert_equal(parity({**EXPERTS, **CELLS[cell]}))
