"""Fine-tuning as on one device: a loss on answers, of which replicas have unequal numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("cell", CELLS)
def test_answers_are_trained_as_on_one_device(talks: dict[str, Any], cell: str) -> None:
    assert_equal(parity({**talks, **CELLS[cell]}))


def test_a_mean_over_the_answers_of_each_replica_is_noticed(talks: dict[str, Any]) -> None:
    assert not parity({**talks, "dp": 2}, mutant="local_count")["passed"]
