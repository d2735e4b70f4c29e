"""What limits a step, and where another plan would win: the model is asked again, and agrees with its own answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.limits import FREE, limits
from parallelrun.planner.predict.step_time.spread import BUBBLE
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.suggest import with_value
from parallelrun.planner.search import open_keys as chosen
from parallelrun.planner.search import requested_searches as searches
from parallelrun.planner.search.crossovers import LENGTH_STEPS, LINKS, MARGIN, SEQ, crossovers
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

PLAN = ("model=gpt3_13b", "strategy=ptdp", "tp=8", "pp=4", "dp=4", "precision=bf16", "cluster=a100_dgx",
        "recompute=full", "global_batch=64", "micro_batch=1")  # fmt: skip
SMALL = ("model=gpt2_124m", "cluster=a100_dgx", "precision=bf16", "global_batch=16", "gpus=4", "micro_batch=4",
         "recompute=none", "layout=1d", "strategy.data.kind=ddp", "pp=1")  # fmt: skip
HOSTS = ("model=llama3_8b", "cluster=h100_dgx", "precision=bf16", "global_batch=64", "gpus=16", "micro_batch=1",
         "recompute=selective", "layout=1d", "strategy.data.kind=fsdp", "pp=1")  # fmt: skip


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


def seconds(found, config, given):
    """The time of a step of a plan of a search, with another configuration; infinite where it does not fit."""
    settled, keys = chosen.with_choice(config, given, found)
    plan, cluster = resolve(settled, given=keys), settled.cluster
    time = step_time(plan, cluster)
    assert time is not None
    fits = cluster_cost.fits(prediction.heaviest(plan, cluster), cluster) == "yes"
    return time.step_s if fits else float("inf")


@pytest.fixture
def patient(monkeypatch):
    """However busy this machine is, nothing is left out."""
    monkeypatch.setattr("parallelrun.planner.search.crossovers.BUDGET_S", float("inf"))


@pytest.mark.slow
def test_a_rate_at_which_another_plan_wins_is_where_both_take_as_long(patient, monkeypatch):
    monkeypatch.setattr("parallelrun.planner.search.crossovers.KEYS", LINKS)
    found = composed(*HOSTS, "cluster.memory_gb=60")  # too little to keep gathered weights: each microbatch moves them
    search = searches.searched(found.config, found.given, 16)
    of_links, all_done = crossovers(found.config, found.given, search)
    assert all_done and of_links, "on slow links between hosts weights are not sharded over them"
    for one in of_links:
        beyond, before = (one.value * factor for factor in ((0.97, 1.03) if one.value < one.now else (1.03, 0.97)))
        there, here = (with_value(found.config, one.key, value) for value in (beyond, before))
        best, margin = search.best[0], 1.01
        assert margin * seconds(one.winner, there, found.given) < seconds(best, there, found.given)
        assert margin * seconds(one.winner, here, found.given) > seconds(best, here, found.given)
        fastest = searches.searched(with_value(found.config, one.key, one.value), found.given, 16).fastest
        assert fastest.time and margin * fastest.time.step_s <= seconds(
            best, with_value(found.config, one.key, one.value), found.given
        )


PIPELINES = (*HOSTS[:3], "global_batch=16", "gpus=16", "micro_batch=1", "recompute=selective", "layout=1d",
             "schedule=1f1b", "strategy.data.kind=zero1")  # fmt: skip


@pytest.mark.slow
def test_tokens_per_microbatch_at_which_another_plan_wins(patient, monkeypatch):
    monkeypatch.setattr("parallelrun.planner.search.crossovers.KEYS", (SEQ,))
    found = composed(*PIPELINES)
    search = searches.searched(found.config, found.given, 16)
    of_tokens, _ = crossovers(found.config, found.given, search)
    assert of_tokens and of_tokens[0].now == found.config.model.seq, "micro_batch=1"
    for one in of_tokens:
        step = (2 if one.value > one.now else 0.5) * one.now - one.now
        before = one.value - (step if abs(one.value - one.now) <= abs(step) else 3 * step) / LENGTH_STEPS
        there, here = (with_value(found.config, SEQ, int(value)) for value in (one.value, before))
        for config, wins in ((there, True), (here, False)):
            margin = (1 + MARGIN) * seconds(one.winner, config, found.given)
            assert (margin <= seconds(search.best[0], config, found.given)) == wins


def test_a_size_at_which_another_plan_wins_has_been_searched(patient):
    found = composed(*SMALL)
    search = searches.searched(found.config, found.given, 4)
    (one,) = [one for one in crossovers(found.config, found.given, search)[0] if one.key == "global_batch"]
    assert one.value < one.now == 16, "at half the batch, four replicas are too many for micro_batch=4"
    smaller = with_value(found.config, one.key, int(one.value))
    assert searches.searched(smaller, found.given, 4).best[0].overrides == one.winner.overrides


def test_what_was_not_looked_for_is_said(monkeypatch):
    monkeypatch.setattr("parallelrun.planner.search.crossovers.BUDGET_S", -1.0)
    found = composed(*SMALL)
    assert crossovers(found.config, found.given, searches.searched(found.config, found.given, 4)) == ([], False)
