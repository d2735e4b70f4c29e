"""Local SGD and DiLoCo before they run: which steps synchronise, and what they promise."""

from __future__ import annotations

import pytest

from tests.plans import tiny_plan

LOCAL_SGD, DILOCO = {"strategy.data.kind": "local_sgd"}, {"strategy.data.kind": "diloco"}


def syncs(steps: int, sync_every: int) -> list[int]:
    strategy = tiny_plan({"dp": 2, "steps": steps, **LOCAL_SGD, "strategy.data.sync_every": sync_every}).data
    return [step for step in range(1, steps + 1) if strategy.meets(step)]


def test_replicas_meet_every_hth_step_and_after_the_last():
    assert syncs(8, 3) == [3, 6, 8]
    assert syncs(6, 3) == [3, 6]
    assert syncs(5, 1) == [1, 2, 3, 4, 5]
    assert syncs(5, 100) == [5]


@pytest.mark.parametrize(("asked", "counted"), [(1, 3), (2, 3), (3, 3), (4, 6), (7, 8), (8, 8), (9, 9), (10, 12)])
def test_the_counted_step_is_the_next_in_which_they_meet(asked, counted):
    strategy = tiny_plan({"dp": 2, "steps": 8, **LOCAL_SGD, "strategy.data.sync_every": 3}).data
    assert strategy.full_step(asked) == counted


def test_every_other_way_sends_the_same_in_each_step():
    strategy = tiny_plan(dp=2).data
    assert strategy.full_step(7) == 7 and strategy.sync_every == 1 and not strategy.independent and strategy.in_step


@pytest.mark.parametrize(("steps", "meetings"), [(1, [1]), (2, [1, 2]), (3, [2, 3]), (5, [3, 5])])
def test_verify_shortens_rounds_until_replicas_meet_twice(steps, meetings):
    strategy = tiny_plan({"dp": 2, **DILOCO, "strategy.data.sync_every": 100}).data.checked(steps)
    assert [step for step in range(1, steps + 1) if strategy.meets(step)] == meetings
    assert tiny_plan({"dp": 2, **DILOCO, "strategy.data.sync_every": 1}).data.checked(steps).sync_every == 1


def test_they_promise_to_equal_their_own_rule():
    assert tiny_plan({"dp": 2, **LOCAL_SGD}).equivalence.kind == "replay"
    assert tiny_plan({"dp": 2, "tp": 2, **DILOCO}).equivalence.kind == "replay"
    assert tiny_plan({"dp": 1, **LOCAL_SGD}).equivalence.kind == "replay"  # of one replica
    assert tiny_plan({"dp": 1, **DILOCO}).equivalence.kind == "replay"  # the outer optimizer is there all the same
