"""The event simulation: known bubbles, its own laws, and the short cut for many microbatches."""

from __future__ import annotations

import random

import pytest

from parallelrun.planner.contract.pipeline_schedule import Action
from parallelrun.planner.predict.simulate import (
    FEW_ACTIONS,
    PAIRED,
    _simulate_with,
    action_times,
    of_plan,
    of_schedule,
    run,
    simulate,
)
from tests.plans import tiny_plan


def equal_times(num_stages):
    ones = [1.0] * num_stages
    return {"F": ones, "B": [2.0] * num_stages, "I": ones, "W": ones}


def schedule(kind, pp, microbatches, virtual_stages=1):
    layers = pp * virtual_stages
    overrides = {"model.layers": layers, "global_batch": microbatches, "microbatches": microbatches}
    return tiny_plan({**overrides, "pp": pp, "schedule": kind, "virtual_stages": virtual_stages})


def simulated(plan, times=None):
    orders = plan.pipeline.actions(plan)
    return simulate(orders, times or equal_times(len(plan.stages)), len(plan.stages))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 24)])
def test_gpipe_and_1f1b_idle_p_minus_1_over_m_of_ideal_time(kind, pp, m):
    simulation = simulated(schedule(kind, pp, m))
    assert simulation.bubble_of_ideal == pytest.approx((pp - 1) / m)
    assert simulation.makespan == pytest.approx(3 * (m + pp - 1))
    assert simulation.bubble_of_total == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize(("pp", "virtual_stages", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (4, 2, 16)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, virtual_stages, m):
    assert simulated(schedule("interleaved", pp, m, virtual_stages)).bubble_of_ideal == pytest.approx(
        (pp - 1) / (virtual_stages * m)
    )


def test_naive_model_parallelism_works_on_one_coordinate_at_a_time():
    assert simulated(schedule("naive", 4, 1)).bubble_of_total == pytest.approx(3 / 4)


def test_zero_bubble_idles_a_third_of_1f1b_and_zbv_less():
    of_1f1b = simulated(schedule("1f1b", 4, 16)).bubble_of_ideal
    split = simulated(schedule("zero_bubble", 4, 16)).bubble_of_ideal
    assert split == pytest.approx(of_1f1b / 3)
    assert simulated(schedule("zbv", 4, 16, 2)).bubble_of_ideal < split


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_dualpipev_idles_as_long_as_its_authors_say(pp, m):
    """(PP / 2 - 1) (F&B + B - 3 W) with PP = 2 pp stages (DeepSeek's DualPipe repository): the table of schedules."""
    simulation = of_schedule(schedule("dualpipev", pp, m, 2))
    assert simulation.makespan == pytest.approx(6 * m + (pp - 1) * (3 + 2 - 3))
    assert simulation.bubble_of_ideal == pytest.approx((pp - 1) / (3 * m))


def test_a_pair_begins_with_the_inputs_of_both_and_sends_when_both_have_ended():
    first = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 3, 0), Action("F", 3, 1)]
    second = [Action("F", 1, 0), Action("F", 2, 0), Action("F", 1, 1), Action("F", 2, 1)]
    order = [[first[0], Action("F", 3, 0), *first[1:]], second]
    times = {"F": [1.0] * 4, "B": [2.0] * 4, PAIRED["F"]: [0.5] * 4, PAIRED["B"]: [1.5] * 4}
    simulation = simulate(order, times, 4)
    assert [(event.begin, event.end) for event in simulation.events(0)] == [(0, 1), (3, 4), (4, 4.5), (4.5, 6), (8, 9)]
    assert simulation.busy == (5.0, 4.0)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_no_action_begins_before_its_inputs_and_none_overlaps_on_a_coordinate(kind):
    plan = schedule(kind, 4, 8, 2 if kind in ("interleaved", "zbv") else 1)
    chance = random.Random(3)
    num_stages = len(plan.stages)
    times = {k: [chance.uniform(0.5, 2) for _ in range(num_stages)] for k in "FBIW"}
    simulation = simulated(plan, times)
    end, begin = {}, {}
    for pp_rank in range(4):
        now = 0.0
        for event in simulation.events(pp_rank):
            assert event.begin >= now - 1e-9
            now = event.end
            kind_of = "F" if event.kind == "F" else "W" if event.kind == "W" else "B"
            begin[kind_of, event.stage, event.microbatch] = event.begin
            end[kind_of, event.stage, event.microbatch] = event.end
    for (kind_of, stage, m), start in begin.items():
        needed = {"F": ("F", stage - 1, m), "B": ("B", stage + 1, m), "W": ("B", stage, m)}[kind_of]
        if needed in end:
            assert start >= end[needed] - 1e-9
        if kind_of == "B":
            assert start >= end["F", stage, m] - 1e-9
    assert simulation.makespan == pytest.approx(max(end.values()))


def test_a_schedule_that_deadlocks_is_found():
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]], equal_times(2), 2)


@pytest.mark.parametrize(
    ("kind", "virtual_stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2), ("dualpipev", 2)],
)
def test_many_microbatches_are_added_up_to_what_simulating_them_all_gives(kind, virtual_stages, monkeypatch):
    monkeypatch.setattr("parallelrun.planner.predict.simulate.FEW_ACTIONS", 0)
    for pp, layers, m in ((2, 5, 40), (3, 7, 60), (4, 11, 72)):
        overrides = {"model.layers": layers, "global_batch": m, "microbatches": m, "pp": pp, "schedule": kind}
        plan = tiny_plan({**overrides, "virtual_stages": virtual_stages})
        short, full = of_plan(plan), _simulate_with(plan, m, action_times(plan))
        assert short.num_microbatches < m
        assert short.makespan == pytest.approx(full.makespan, rel=1e-9)
        assert short.bubble_of_total == pytest.approx(full.bubble_of_total, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "virtual_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 2)]
)
def test_uneven_stages_are_never_added_up_wrongly(kind, virtual_stages, monkeypatch):
    """An early round may be shorter than later ones: under gpipe, where one stage is slow forward, one backward."""
    monkeypatch.setattr("parallelrun.planner.predict.simulate.FEW_ACTIONS", 0)
    chance = random.Random(5)
    for pp, m in ((2, 30), (3, 30), (4, 40)):
        layers = pp * virtual_stages
        overrides = {"model.layers": layers, "global_batch": m, "microbatches": m, "pp": pp, "schedule": kind}
        plan = tiny_plan({**overrides, "virtual_stages": virtual_stages})
        for _ in range(8):
            times = {k: [chance.choice([1.0, 1.0, 3.0]) for _ in plan.stages] for k in "FIW"}
            times["B"] = [a + b for a, b in zip(times["I"], times["W"])]
            assert run(plan, times).makespan == pytest.approx(_simulate_with(plan, m, times).makespan, rel=1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_repeats_the_layers_and_not_the_head(recompute):
    """What is counted again is what the runtime runs again (`Network.recomputed`)."""
    plan = tiny_plan(pp=2, microbatches=4, recompute=recompute, model__vocab=256)
    layers, head = plan.spec.block("layers.0").forward_flops, plan.spec.block("head").forward_flops
    share = plan.batch.micro_batch
    for stage, (forward, both) in enumerate(zip(*(action_times(plan)[kind] for kind in "FB"), strict=True)):
        num_layers = sum(name.startswith("layers.") for name in plan.stages[stage].blocks)
        assert num_layers and forward == share * (num_layers * layers + stage * head)
        again = share * num_layers * layers if recompute == "full" else 0
        assert both == 2 * forward + again
    split = action_times(plan)
    assert [i + w for i, w in zip(split["I"], split["W"])] == split["B"]


def test_rounds_of_more_microbatches_than_ranks_are_simulated_whole():
    """143 microbatches on 12 ranks are 11 rounds of 13; no order is known of 12 more than 3 rounds."""
    plan = tiny_plan(
        {"model.layers": 36, "pp": 12, "schedule": "zero_bubble", "virtual_stages": 2, "global_batch": 143,
         "micro_batch": 1}
    )  # fmt: skip
    times = action_times(plan)
    whole = simulate(plan.pipeline.actions(plan), times, len(plan.stages))
    assert 2 * plan.batch.microbatches * len(plan.stages) > FEW_ACTIONS
    assert of_plan(plan).makespan == pytest.approx(whole.makespan)
