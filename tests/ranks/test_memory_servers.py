"""The predicted memory of workers and parameter servers beside the bytes of the tensors that they hold, within 3 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelrun.planner.predict import prediction
from tests.matrix import shared
from tests.ranks.ps_body import ps_plan, run
from tests.ranks.test_memory import BOUND, GPT

SHAPE = GPT | {"global_batch": 12, "micro_batch": 4, "steps": 3, "strategy.data.shard_min_kb": 16}
SGD = {"optimizer.name": "sgd"}
PLANS: dict[str, dict[str, Any]] = {
    "three workers": SHAPE,
    "two servers": SHAPE | SGD | {"dp": 2, "global_batch": 8, "strategy.data.servers": 2},
    "async": SHAPE
    | SGD
    | {"dp": 2, "global_batch": 8, "optimizer.momentum": 0.9, "strategy.data.consistency": "async"},
    "tp": SHAPE | SGD | {"dp": 2, "tp": 2, "global_batch": 8, "strategy.data.servers": 2},
    "cp, async": SHAPE | SGD | {"dp": 2, "cp": 2, "global_batch": 8, "strategy.data.consistency": "async"},
    "several microbatches": SHAPE | {"dp": 2, "micro_batch": 2},
}


@pytest.mark.parametrize("name", shared(PLANS))
def test_the_predicted_memory_is_within_three_percent_of_what_is_held(tmp_path: Path, name: str):
    plan = ps_plan(PLANS[name])
    run(tmp_path, PLANS[name], change="record_peaks")
    errors = {
        f"{plan.role(rank)} {rank}": prediction.memory(plan, rank).total / int((tmp_path / f"peak_{rank}").read_text())
        - 1
        for rank in range(plan.world)
    }
    assert not {where: f"{error:+.1%}" for where, error in errors.items() if abs(error) > BOUND}, errors
