"""Does a plan fit, in one unit, why, and what to type where it does not."""

from __future__ import annotations

import re

import pytest

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.facts.advice import memory_advice, warnings
from parallelrun.planner.facts.plan_facts import facts
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.suggest import with_value
from tests.plans import tiny_config

DEEP = {"model.layers": 8, "model.hidden": 512, "model.heads": 8, "model.seq": 128, "global_batch": 64}


def config_of(**overrides: object) -> Config:
    return tiny_config({**DEEP, **overrides})


def as_typed(config: Config, text: str) -> Config:
    for key, value in re.findall(r"([a-z_.0-9]+)=([\w]+)", text):
        found = with_value(config, key, int(value) if value.isdigit() else {"true": True}.get(value, value))
        assert found is not None, key
        config = found
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": 8, "cluster.memory_gb": 0.42},
        {"dp": 8, "recompute": "full", "cluster.memory_gb": 0.3},
        {"dp": 8, "recompute": "full", "strategy.data.kind": "zero1", "cluster.memory_gb": 0.2},
        {"tp": 2, "pp": 2, "dp": 2, "cluster.memory_gb": 0.1},
        {"dp": 2, "cluster.memory_gb": 0.1},
    ],
)
def test_every_change_that_is_advised_makes_the_plan_fit_and_is_not_made_already(overrides):
    config = config_of(**overrides)
    plan = resolve(config)
    assert cluster_cost.fits(prediction.heaviest(plan, config.cluster), config.cluster) == "no"
    said = memory_advice(plan, config)
    assert said.endswith("fits") or " fits (" in said, said
    for alternative in said.split(" or "):
        changed = as_typed(config, alternative)
        assert changed != config, f"{alternative}: that is what the plan is"
        found = resolve(changed)
        assert cluster_cost.fits(prediction.heaviest(found, config.cluster), config.cluster) == "yes", alternative


def test_what_fits_no_device_is_said_with_the_least_that_was_found():
    config = config_of(dp=2, **{"model.hidden": 4096, "cluster.memory_gb": 0.1})
    assert re.search(r"=.* needs the least that was found, 0\.\d+ GiB", memory_advice(resolve(config), config))


def test_need_and_device_are_told_in_one_unit():
    config = config_of(dp=2, **{"cluster.memory_gb": 0.1})
    plan = resolve(config)
    (text,) = [text for text in warnings(plan, config, facts(plan, config)) if "does not fit" in text]
    assert "needs 0." in text and "a device has 0.0931 GiB" in text
    assert not re.search(r"\bGB\b", text)


@pytest.mark.parametrize(
    ("gb", "verdict", "why"),
    [
        (None, "unknown", "cluster.memory_gb is not given"),
        (100.0, "yes", "a device has 93.1 GiB"),
        (75.0, "unknown", "a device has 69.8 GiB; what is not counted may need more than the 4.8 GiB left"),
        (69.0, "no", "a device has 64.3 GiB"),
    ],
)
def test_every_verdict_has_its_reason(gb, verdict, why):
    memory, cluster = Memory(65 * 2**30, 0, 0, 0), ClusterConfig(memory_gb=gb)
    assert (cluster_cost.fits(memory, cluster), cluster_cost.why_fits(memory, cluster)) == (verdict, why)
