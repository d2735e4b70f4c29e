"""What limits a step, and where another plan would win: the model is asked again, and agrees with its own answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.plan import chosen
from parallelrun.plan.flips import flips
from parallelrun.plan.limits import FREE, limits
from parallelrun.plan.resolve import resolve
from parallelrun.plan.step_time.spread import BUBBLE
from parallelrun.plan.step_time.step import step_time
from parallelrun.plan.suggest import with_value
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

PLAN = ("model=gpt3_13b", "strategy=ptdp", "tp=8", "pp=4", "dp=4", "precision=bf16", "cluster=a100_dgx",
        "recompute=full", "global_batch=64", "micro_batch=1")  # fmt: skip
SMALL = ("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "global_batch=16", "gpus=4", "micro_batch=4",
         "recompute=none", "layout=1d", "strategy.data.kind=ddp", "pp=1")  # fmt: skip


def test_each_limit_is_what_the_step_would_be_shorter_without_it_the_largest_first():
    plan, cluster = planned(*PLAN), composed(*PLAN).config.cluster
    time = step_time(plan, cluster)
    assert time is not None
    found = limits(plan, cluster, time)
    saved = {one.name: one.saved_s for one in found}
    assert list(saved.values()) == sorted(saved.values(), reverse=True) and min(saved.values()) > 0
    assert saved[BUBBLE] == time.parts[BUBBLE]
    fast = step_time(plan, replace(cluster, intra_gb_s=FREE["links inside a host"]["intra_gb_s"]))
    assert fast is not None and saved["links inside a host"] == time.step_s - fast.step_s
    assert saved["links inside a host"] < sum(s for name, s in time.parts.items() if "communication" in name)


def test_what_costs_next_to_nothing_is_no_limit():
    plan, cluster = planned(*PLAN), replace(composed(*PLAN).config.cluster, inter_gb_s=1e9)
    time = step_time(plan, cluster)
    assert time is not None and "links between hosts" not in {one.name for one in limits(plan, cluster, time)}
    slow = replace(cluster, inter_gb_s=0.1)
    slower = step_time(plan, slow)
    assert slower is not None and limits(plan, slow, slower)[0].name == "links between hosts"


@pytest.fixture(scope="module")
def searched():
    found = composed(*SMALL)
    return found.config, found.given, chosen.searched(found.config, found.given, 4)


def test_a_flip_is_where_the_other_plan_begins_to_win(searched):
    """Data parallel wins on NVLink; on slow links it loses gradients' time, and at a smaller batch samples."""
    config, given, search = searched
    best = search.best[0]

    def seconds(found, changed):
        settled, keys = chosen.settled(changed, given, found)
        time = step_time(resolve(settled, given=keys), settled.cluster)
        assert time is not None
        return time.step_s

    found = flips(config, given, search)
    assert found, "at half the batch, four replicas are too many for micro_batch=4"
    for one in found:
        there = with_value(config, one.key, int(one.value) if one.key in ("global_batch", "model.seq") else one.value)
        again = chosen.searched(there, given | {one.key}, 4).best[0]
        assert again.overrides != best.overrides and again.time is not None
        if one.key.startswith("cluster."):
            before = with_value(config, one.key, one.value * (1.01 if one.value < one.now else 0.99))
            assert seconds(one.winner, there) < seconds(best, there)
            assert seconds(one.winner, before) >= seconds(best, before) * (1 - 1e-6)
