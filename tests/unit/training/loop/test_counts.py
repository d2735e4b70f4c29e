"""The counts of a step in which some workers have joined: a replay uses the same functions, and would not see a bug."""

from __future__ import annotations

from parallelrun.training.loop.step import count_active
from tests.plans import tiny_plan


def test_workers_that_have_joined_are_not_active() -> None:
    join = {"strategy.data.worker_batches": (1, 5, 2)}
    plan = tiny_plan({"dp": 3, "global_batch": 12, "strategy.data.kind": "horovod", **join})
    assert tuple(count_active(plan, step) for step in (1, 2, 3)) == (3, 2, 1)
