"""bert under data, tensor and pipeline schedules: masked targets counted over all replicas, both halves of a tie
agree."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import assert_equal, parity

BERT: dict[str, Any] = {"model.name": "bert", "model.preset": "bert", "model.layers": 2, "dataset.samples": 64}
BIAS = {"model.head_bias": True}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
CELLS = [
    {"dp": 2},
    {"tp": 2, "model.vocab": 37, "model.label_smoothing": 0.1, "recompute": "full", **BIAS},
    {"tp": 2, "recompute": "full", **SEQUENCE},
    {"pp": 2, "dp": 2, "schedule": "1f1b", "microbatches": 2},
    {"tp": 2, "pp": 2, "schedule": "zero_bubble", "virtual_stages": 1, "microbatches": 2, **SEQUENCE, **BIAS},
    {"dp": 2, "tp": 2, "strategy.data.kind": "fsdp", **BIAS},
    {"tp": 4, "layout": "2d", **BIAS},
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(f"{k.split('.')[-1]}={v}" for k, v in cell.items()))
def test_bert_equals_one_device(cell: dict[str, Any]) -> None:
    assert_equal(parity({**BERT, **cell}))
