"""ep over dp x tp: complete experts on every rank, whose tp groups divide the tokens, train as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.matrix import FULL as FULL_RUN
from tests.parity import assert_equal, parity

EXPERTS: dict[str, Any] = {
    "model.experts": 8, "model.expert_period": 2, "model.router.capacity_factor": 1.25, "optimizer.clip": 0.05,
    "strategy.expert.tp": 1, "strategy.expert.kind": "dropless",
}  # fmt: skip
CELLS: dict[str, dict[str, Any]] = {
    "dropless": {"dp": 2, "tp": 2, "ep": 4},
    "dropless, sequence": {"dp": 2, "tp": 2, "ep": 4, "strategy.tensor.sequence_parallel": True},
    "capacity": {"dp": 2, "tp": 2, "ep": 4, "strategy.expert.kind": "capacity"},
    "one replica": {"tp": 2, "ep": 2},
}


@pytest.mark.parametrize("cell", CELLS)
def test_training_is_that_of_one_device_and_sends_what_was_predicted(cell):
    assert_equal(parity({**EXPERTS, **CELLS[cell]}))
