"""Lower bounds of time and memory, and steps that stand for longer ones."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from parallelrun.planner.contract.classes import pipeline_schedule
from parallelrun.planner.memory import peak
from parallelrun.planner.memory.backward_block import backward_block, keeps_rounded
from parallelrun.planner.predict import prediction, simulate
from parallelrun.planner.search import fastest_plans as engine
from parallelrun.planner.search.fastest_plans import search
from parallelrun.planner.search.legal import Legal
from parallelrun.planner.search.space import Space
from tests.plans import tiny_plan
from tests.unit.config.test_presets import composed

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")


def planned(schedule: str, pp: int, rounds: int, data: str = "ddp", recompute: str = "none"):
    count = rounds * pp
    return tiny_plan(
        pp=pp, dp=2, schedule=schedule, model__layers=16, micro_batch=1, global_batch=2 * count, recompute=recompute,
        strategy__data__kind=data, dataset__samples=4 * count,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("data", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_shorter_step_holds_as_much_at_its_peak(schedule, data):
    for pp in (2, 4):
        for recompute in ("none", "full"):
            plan = planned(schedule, pp, 7, data, recompute)
            short = prediction._shortened(plan)
            assert (short.batch.microbatches < plan.batch.microbatches) == pipeline_schedule(schedule).repeats
            shown = prediction.memories(plan)
            for pp_rank, memory in shown.items():
                assert memory == prediction.memory(plan, plan.mesh.rank(pp=pp_rank))
            heaviest = prediction.heaviest(plan, composed("cluster=local").config.cluster)
            assert heaviest.tensors == max(memory.tensors for memory in shown.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_as_many_microbatches_are_in_flight_as_the_schedule_says(schedule):
    for pp, rounds in ((2, 1), (2, 3), (4, 2), (4, 5)):
        plan = planned(schedule, pp, rounds)
        for rank, order in enumerate(plan.pipeline.actions(plan)):
            before = next(index for index, action in enumerate(order) if action.kind != "F")
            least = plan.pipeline.least_in_flight(pp, plan.pipeline.virtual_stages, plan.batch.microbatches, rank)
            assert before - 1 <= least <= before


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_is_shorter_than_its_bound(schedule):
    for pp, rounds in ((2, 1), (4, 3), (8, 2)):
        plan = planned(schedule, pp, rounds)
        numbers = range(len(plan.stages))
        forward = [1.0 + 0.3 * (stage * 7 % 5) for stage in numbers]
        times = {"F": forward, "B": [2 * one for one in forward], "I": forward, "W": forward}
        least, full = simulate.least(plan, times), simulate.run(plan, times).makespan
        assert 0.5 * full < least <= full * (1 + 1e-12)
    even = planned("1f1b", 4, 3)
    times = {kind: [one] * 4 for kind, one in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0))}
    assert simulate.least(even, times) == simulate.run(even, times).makespan  # equal stages: exact


def test_a_shorter_step_without_its_batch_would_hold_less():
    plan = planned("1f1b", 2, 7)
    short = replace(plan, batch=replace(plan.batch, microbatches=peak.ROUNDS * 2))
    assert prediction.memory(short, 0).total < prediction.memory(plan, 0).total


def test_no_block_needs_less_than_its_bound_whether_its_second_forward_keeps_rounded_weights_or_not():
    """One bound is for all data strategies. With fsdp weights arrive rounded and their gradients leave widened; with
    zero1 and zero2 both are rounded; with ddp weights are rounded again."""
    found = composed("model=gpt2_124m", "precision=bf16", "global_batch=16", "recompute=full", "tp=1", "pp=1")
    space = Space(found.config, found.given, 4)
    searched = engine._Searched(Legal(space, engine._spec(space), "cuda"), found.config.cluster, 3)
    bounds, spare = searched.first_pass.bounds, {}
    for row in searched.first_pass.rows:
        bound = bounds._of_backward(row.group, row.micro_batch, row.recompute).working
        for _, data in searched.first_pass.memory(row).datas:
            plan = searched._plan(row, data)
            own = backward_block(bounds._commonest, plan, keeps_rounded(plan)).working_bytes(accumulates=False)
            spare.setdefault(data.kind, set()).add(own - bound)
    assert spare["zero1"] == spare["zero2"] == {0} and min(spare["fsdp"] | spare["ddp"]) > 0, spare


def test_no_block_is_faster_than_its_bound_whatever_its_data_strategy_does_to_weights():
    """The strategies of a group have one bound, also in a space without fsdp, which spares a microbatch most."""
    found = composed("model=gpt2_124m", "precision=bf16", "cluster=a100_dgx", "global_batch=16", "tp=1", "pp=1")
    space = Space(found.config, found.given, 4)
    searched = engine._Searched(Legal(space, engine._spec(space), "cuda"), found.config.cluster, 3)
    bounds, group = searched.first_pass.bounds, searched.first_pass.rows[0].group
    kinds = {one.kind: one for one in group.datas}
    seconds = {
        names: bounds.seconds(group._replace(datas=tuple(kinds[one] for one in names)), 1, True)[:2]
        for names in (("fsdp",), ("zero1",), ("ddp",), ("ddp", "zero1"), ("ddp", "zero1", "fsdp"))
    }
    assert sum(seconds["fsdp",]) < sum(seconds["zero1",]) < sum(seconds["ddp",])
    assert seconds["ddp", "zero1"] == seconds["zero1",] and seconds["ddp", "zero1", "fsdp"] == seconds["fsdp",]


def test_thousands_of_plans_are_searched_in_seconds():
    """About one CPU second on an idle core; the bound allows for a busy one."""
    found = composed("model=llama3_8b", "cluster=h100_dgx", "global_batch=512", "precision=bf16")
    begin = time.process_time()
    result = search(found.config, found.given, 64)
    assert result.considered > 5000 and len(result.best) >= 3
    assert time.process_time() - begin < 10
