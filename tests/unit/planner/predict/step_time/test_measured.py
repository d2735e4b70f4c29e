"""The constant that explains the difference between a predicted and a measured step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parallelrun.config.keys import known_keys
from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.measured import STEP, _solved, as_measured, beside, explanation
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA, OPTIMIZER, PIPELINE
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.report.plans import predicted as report
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

LARGE = ("model=gpt3_175b", "strategy=ptdp", "precision=bf16", "cluster=a100_dgx", "recompute=full", "tp=8", "pp=4",
         "dp=8", "global_batch=512")  # fmt: skip
SMALL = ("model=gpt", "strategy=ptdp", "precision=bf16", "cluster=a100_dgx", "tp=2", "pp=2", "dp=2")
SHARED_CORES = ("model=gpt", "strategy=ptdp", "tp=2", "pp=2", "cluster=laptop", "cluster.memory_gb_s=8",
                "cluster.cores=2")  # fmt: skip


def measured(overrides: tuple[str, ...], **changed: float) -> dict[str, float]:
    """The step and its parts of a machine whose constants differ from those of the plan's cluster."""
    cluster = replace(composed(*overrides).config.cluster, **changed)
    found = step_time(planned(*overrides), cluster)
    assert found is not None
    return {STEP: found.step_s, **as_measured(found)}


def explained(overrides: tuple[str, ...], seconds: dict[str, float]):
    return explanation(planned(*overrides), composed(*overrides).config.cluster, seconds)


@pytest.mark.parametrize(
    ("overrides", "key", "factor"),
    [
        (LARGE, "product_efficiency", 0.5),
        (LARGE, "product_efficiency", 1.2),
        (LARGE, "inter_gb_s", 0.25),
        (SMALL, "operation_us", 0.4),
        (SMALL, "operation_us", 3.0),
    ],
)
def test_the_constant_that_differs_is_found_with_its_value(overrides, key, factor):
    value = getattr(composed(*overrides).config.cluster, key)
    found = explained(overrides, measured(overrides, **{key: value * factor}))
    assert found is not None and (found.key, found.value) == (f"cluster.{key}", value)
    assert found.instead == pytest.approx(value * factor, rel=0.05) and found.explains > 0.95


def test_constants_that_do_the_same_explain_the_same():
    found = explained(LARGE, measured(LARGE, link_efficiency=0.3))
    assert found is not None and found.key in ("cluster.link_efficiency", "cluster.intra_gb_s", "cluster.inter_gb_s")
    assert found.explains > 0.9 and found.instead < 0.6 * found.value


def test_slow_links_are_told_from_slow_products_by_the_parts_alone():
    parts = measured(LARGE, inter_gb_s=6.0)
    assert explained(LARGE, parts).key == "cluster.inter_gb_s"
    assert explained(LARGE, {STEP: parts[STEP]}).key == "cluster.product_efficiency", "it needs the least change"


def test_a_prediction_that_agrees_needs_no_explanation():
    seconds = measured(LARGE)
    assert explained(LARGE, seconds) is None
    assert explained(LARGE, {STEP: 1.04 * seconds[STEP]}) is None
    assert explained(LARGE, {STEP: 1.1 * seconds[STEP]}) is not None


@pytest.mark.parametrize("factor", [0.05, 0.4, 100.0])
def test_a_constant_stays_within_its_plausible_range(factor):
    seconds = measured(LARGE)[STEP] * factor
    found = explained(LARGE, {STEP: seconds})
    key = known_keys()[found.key]
    low, high = key.plausible or (0.0, key.most)
    assert low <= found.instead <= high and 1 / 16 <= found.instead / found.value <= 16
    if factor == 0.05:
        assert found.explains < 0.5
        text = report.text(beside(planned(*LARGE), composed(*LARGE).config.cluster, {STEP: seconds}), seconds)
        assert "no single constant of the cluster explains the difference" in text


def test_the_search_starts_where_a_part_takes_no_time():
    """Communication that computation hides completely, until calls take longer."""
    found = _solved("collective_us", 30.0, lambda value: max(0.0, value - 40.0) * 1e-6, 0.0, 1e-4)
    assert found == pytest.approx(140, rel=0.2)


def test_parts_that_take_no_time_do_not_matter():
    seconds = {**measured(LARGE), "comm_exposed_s": 0.0}
    seconds[STEP] = sum(value for name, value in seconds.items() if name != STEP)
    found = explained(LARGE, seconds)
    assert found is not None and found.key in ("cluster.intra_gb_s", "cluster.link_efficiency", "cluster.inter_gb_s")


@pytest.mark.parametrize("overrides", [LARGE, SMALL, SHARED_CORES])
def test_predicted_parts_add_up_by_what_a_run_measures(overrides):
    plan, cluster = planned(*overrides), composed(*overrides).config.cluster
    found = beside(plan, cluster, {STEP: None})
    assert found is not None and found["explanation"] is None
    assert found["compute_s"] + found["comm_exposed_s"] + found["bubble_s"] == pytest.approx(found["step_s"])
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"])
    parts = found["parts"]
    assert found["bubble_s"] == pytest.approx(parts.get(BUBBLE, 0) + parts[PIPELINE])
    assert found["comm_exposed_s"] == pytest.approx(parts[blocks.TENSOR] + parts.get(DATA, 0))
    assert found["optimizer_s"] == parts[OPTIMIZER]


def test_where_ranks_share_cores_only_the_step_is_compared():
    """A rank that waits to communicate may wait for a core, so the parts would blame the links."""
    plan, cluster = planned(*SHARED_CORES), composed(*SHARED_CORES).config.cluster
    step = beside(plan, cluster, {STEP: None})["step_s"]
    waiting = {STEP: 2 * step, "compute_s": 0.2 * step, "comm_exposed_s": 1.8 * step, "bubble_s": 0.0}
    found = beside(plan, cluster, waiting)
    assert found["explanation"] == beside(plan, cluster, {STEP: 2 * step})["explanation"]
    assert "computing" not in report.text(found, 2 * step)


def test_without_rates_nothing_is_predicted():
    assert beside(planned("model=gpt"), composed("cluster=local").config.cluster, {STEP: 1.0}) is None


def test_the_screen_says_how_far_off_the_prediction_is_and_why():
    plan, cluster = planned(*LARGE), composed(*LARGE).config.cluster
    seconds = measured(LARGE, product_efficiency=0.4)
    found = beside(plan, cluster, seconds)
    lines = report.text(found, seconds[STEP]).splitlines()
    assert f"measured is {seconds[STEP] / found['step_s'] - 1:.0%} longer" in lines[0]
    assert "% shorter" in report.text(found, 0.5 * found["step_s"])
    assert [word in lines[1] for word in ("computing", "waiting to communicate", "bubble")] == [True] * 3
    value = cluster.product_efficiency
    assert re.fullmatch(
        rf"cluster.product_efficiency=0.\d+ instead of {value} explains \d+% of the difference", lines[2]
    )
