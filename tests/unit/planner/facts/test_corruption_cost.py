"""A plan says what looking for silent data corruption costs, and what it leaves out."""

from __future__ import annotations

import pytest

from parallelrun.planner.facts.corruption_cost import checks
from parallelrun.report.plans.plan_cost import corruption_text
from tests.plans import tiny_config, tiny_plan


def looked_for(**over):
    config, plan = tiny_config(over), tiny_plan(over)
    return checks(plan, config), corruption_text(plan, config)


def test_a_plan_without_checks_has_nothing_to_say():
    assert looked_for(dp=2) == (None, "")


@pytest.mark.parametrize("kind,alone", [("ddp", 0.0), ("zero1", 1.0), ("fsdp", 1.0)])
def test_state_that_no_other_rank_holds_is_left_out(kind, alone):
    found, text = looked_for(dp=2, strategy__data__kind=kind, sdc__every=50)
    assert found.alone == alone and ("of the optimizer's state" in text) == bool(alone)


def test_replicas_of_a_sharded_state_are_seen():
    found, _ = looked_for(dp=2, tp=2, sdc__every=50)
    assert found.alone == 0.0


def test_without_replicas_of_stages_nothing_is_compared():
    assert looked_for(pp=2, sdc__every=50)[0].alone == 1.0


@pytest.mark.parametrize(
    "over,said",
    [
        ({"dp": 2}, ""),
        ({"dp": 2, "strategy__data__kind": "local_sgd"}, "are not compared"),
        ({"dp": 2, "strategy__data__kind": "horovod", "strategy__data__reduction": "adasum"}, "are not compared"),
    ],
)
def test_replicas_that_train_apart_are_not_compared(over, said):
    _, text = looked_for(sdc__every=50, **over)
    assert ("which train apart" in text) == bool(said) and said in text


def test_steps_computed_twice_cost_one_more_and_leave_nothing_out():
    rare, text = looked_for(dp=2, sdc__every=50)
    assert rare.share_of_flops == 2 / 8 / 50 and "sdc.recompute=true" in text
    twice, text = looked_for(dp=2, sdc__every=1, sdc__recompute=True)
    assert twice.share_of_flops == 2 / 8 + 1 and "not seen" not in text


def test_the_time_is_said_where_the_cluster_gives_rates():
    rates = {"peak_tflops": {"fp32": 0.05}, "memory_gb_s": 10.0, "intra_gb_s": 5.0}
    found, text = looked_for(dp=2, sdc__every=50, **{f"cluster__{key}": value for key, value in rates.items()})
    assert found.check_s > 0 and found.share_of_time > 2 / 8 / 50 and "more time" in text
