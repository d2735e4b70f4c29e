"""The plan with which an elastic run goes on: dp shrinks first, the global batch stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.base.errors import ConfigError
from parallelrun.planner.resolve import elastic
from parallelrun.planner.resolve.elastic import fitting
from parallelrun.planner.resolve.freeze import filled
from parallelrun.planner.resolve.resolve_config import resolve
from tests.plans import tiny_config, tiny_plan


def shrunk(most, exact=False, **overrides):
    asked = tiny_config({"restarts": 3, "elastic": True, "global_batch": 8, **overrides})
    plan = resolve(asked)
    found = fitting(asked, filled(asked, plan), plan, most, exact)
    if found is None:
        return None
    config, now = found
    assert now.batch.global_batch == plan.batch.global_batch
    assert now.batch.micro_batch <= plan.batch.micro_batch  # more microbatches, no more memory
    assert resolve(config) == replace(now, filled=())  # the frozen configuration gives the same plan
    return {axis: size for axis, size in now.degrees.items() if size > 1}


@pytest.mark.parametrize(
    ("before", "most", "after"),
    [
        ({"dp": 4}, 3, {"dp": 2}),  # 8 samples are not divisible by 3
        ({"dp": 2, "tp": 2}, 3, {"tp": 2}),
        ({"dp": 4, "tp": 2}, 7, {"dp": 2, "tp": 2}),
        ({"dp": 2, "pp": 2, "tp": 2}, 7, {"pp": 2, "tp": 2}),
        ({"tp": 4}, 3, {"tp": 2}),  # dp cannot shrink
        ({"pp": 4}, 3, {"pp": 2}),
        ({"dp": 4, "strategy.data.kind": "fsdp"}, 3, {"dp": 2}),
        ({"dp": 4, "micro_batch": 2}, 3, {"dp": 2}),
        ({"dp": 4, "world": 4}, 3, {"dp": 2}),
        ({"dp": 4, "microbatches": 2}, 2, {"dp": 2}),
    ],
)
def test_dp_shrinks_first_then_the_other_degrees(before, most, after):
    assert shrunk(most, **before) == after


def test_a_launcher_that_brings_ranks_back_gets_a_plan_for_exactly_them():
    assert shrunk(2, exact=True, dp=4) == {"dp": 2}
    assert shrunk(3, exact=True, dp=4) is None
    assert shrunk(8, exact=True, dp=4) == {"dp": 8}


def test_min_world_is_the_least():
    assert shrunk(3, dp=4, min_world=2) == {"dp": 2}
    assert shrunk(3, dp=4, min_world=3) is None


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"restarts": -1}, "restarts"),
        ({"restarts": 1001}, "restarts"),
        ({"elastic": True}, "elastic"),
        ({"min_world": 1}, "min_world"),
        ({"restarts": 1, "elastic": True, "min_world": 5, "dp": 4}, "min_world"),
        ({"restarts": 1, "elastic": True, "min_world": 0}, "min_world"),
        ({"restarts": 1, "verb": "bench"}, "restarts"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, key):
    with pytest.raises(ConfigError) as caught:
        resolve(tiny_config(overrides))
    assert [problem.where for problem in caught.value.problems] == [key]


@pytest.mark.parametrize("spanned", [{"cp": 2}, {"tp": 2, "strategy.expert.tp": 1}], ids=["cp", "tp"])
def test_experts_stay_spread_over_all_axes_that_ep_spans(spanned):
    """Half of the ranks are gone: two replicas of two ranks still hold a fourth of the experts each."""
    plan = tiny_plan({"model.experts": 8, "dp": 4, "ep": 4, "global_batch": 8, **spanned})
    first = next(elastic._candidates(plan, 4, 1, False))
    assert (first["dp"], first["cp"] * first["tp"], first["ep"]) == (2, 2, 4)
