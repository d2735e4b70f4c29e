"""The counts of a step in which some workers have joined: a replay uses the same functions, and would not see a bug."""

from __future__ import annotations

import pytest

from parallelrun.training.loop.step import count_active, count_samples
from tests.plans import tiny_plan


@pytest.mark.parametrize(
    ("divisor", "samples"), [("initial", (12, 12, 12)), ("active", (12, 8, 4))], ids=["by all", "by the active"]
)
def test_samples_that_are_counted_where_workers_join(divisor: str, samples: tuple[int, ...]) -> None:
    join = {"strategy.data.worker_batches": (1, 5, 2), "strategy.data.join_divisor": divisor}
    plan = tiny_plan({"dp": 3, "global_batch": 12, "strategy.data.kind": "horovod", **join})
    assert tuple(count_active(plan, step) for step in (1, 2, 3)) == (3, 2, 1)
    assert tuple(count_samples(plan, step) for step in (1, 2, 3)) == samples
