"""The search finds what brute force finds."""

from __future__ import annotations

from parallelrun.plan.resolve import resolve
from parallelrun.plan.search.search import search
from parallelrun.plan.step_time.step import step_time
from tests.unit.config.test_presets import composed

SMALL = ("model=gpt2_124m", "model.layers=2", "cluster=a100_dgx", "precision=bf16", "global_batch=16")


def test_the_best_plans_are_those_of_their_overrides():
    found = composed(*SMALL)
    result = search(found.config, found.given, 4)
    assert result.considered >= result.fitting > 100 and len(result.best) == 3
    for one in result.best:
        again = composed(*SMALL, f"world={result.world}", *one.overrides)
        assert step_time(resolve(again.config, given=again.given), again.config.cluster) == one.time


def test_what_the_user_has_given_holds_for_all_plans():
    words = (*SMALL, "tp=2", "strategy.data.kind=zero1", "schedule=1f1b")
    found = composed(*words)
    result = search(found.config, found.given, 4)
    assert result.best and not any(
        word.startswith(("tp=", "strategy.data", "schedule")) for one in result.best for word in one.overrides
    )
