"""The predicted step by the parts that a run measures, and how far it is off."""

from __future__ import annotations

import pytest

from parallelrun.planner.predict.step_time import blocks
from parallelrun.planner.predict.step_time.measured import predicted_step
from parallelrun.planner.predict.step_time.spread import BUBBLE, DATA, OPTIMIZER, PIPELINE
from parallelrun.report.plans import predicted as report
from tests.unit.config.test_presets import composed
from tests.unit.config.test_presets import plan as planned

LARGE = ("model=gpt3_175b", "strategy=ptdp", "precision=bf16", "cluster=a100_dgx", "recompute=full", "tp=8", "pp=4",
         "dp=8", "global_batch=512")  # fmt: skip
SMALL = ("model=gpt", "strategy=ptdp", "precision=bf16", "cluster=a100_dgx", "tp=2", "pp=2", "dp=2")
SHARED_CORES = ("model=gpt", "strategy=ptdp", "tp=2", "pp=2", "cluster=laptop", "cluster.memory_gb_s=8",
                "cluster.cores=2")  # fmt: skip


def prediction(overrides: tuple[str, ...]):
    return predicted_step(planned(*overrides), composed(*overrides).config.cluster)


@pytest.mark.parametrize("overrides", [LARGE, SMALL, SHARED_CORES])
def test_predicted_parts_add_up_by_what_a_run_measures(overrides):
    step = prediction(overrides)
    assert step is not None
    assert step["compute_s"] + step["comm_exposed_s"] + step["bubble_s"] == pytest.approx(step["step_s"])
    assert sum(step["parts"].values()) == pytest.approx(step["step_s"])
    parts = step["parts"]
    assert step["bubble_s"] == pytest.approx(parts.get(BUBBLE, 0) + parts[PIPELINE])
    assert step["comm_exposed_s"] == pytest.approx(parts[blocks.TENSOR] + parts.get(DATA, 0))
    assert step["optimizer_s"] == parts[OPTIMIZER]


def test_without_rates_nothing_is_predicted():
    assert prediction(("model=gpt", "cluster=local")) is None


def test_the_screen_says_how_far_off_the_prediction_is():
    step = prediction(LARGE)
    lines = report.text(step, 1.5 * step["step_s"]).splitlines()
    assert "measured is 50% longer" in lines[0]
    assert "measured is 50% shorter" in report.text(step, 0.5 * step["step_s"])
    assert [word in lines[1] for word in ("computing", "waiting to communicate", "bubble")] == [True] * 3
    assert len(report.text(prediction(SHARED_CORES), None).splitlines()) == 1, "a rank may wait for a core"
