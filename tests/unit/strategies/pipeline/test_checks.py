"""What pipeline schedules refuse, with the way out, and what they predict."""

from __future__ import annotations

import pytest

from parallelrun.base import registry
from parallelrun.base.errors import ConfigError
from parallelrun.models.gpt import spec as gpt
from parallelrun.planner.contract.classes import pipeline_schedule
from parallelrun.planner.contract.plan import BatchSizes
from parallelrun.planner.contract.request import Request
from tests.plans import tiny_config, tiny_plan

KINDS = ["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]


def request(pp: int, m: int | None, virtual_stages: int = 1, samples: int = 48, **overrides) -> Request:
    config = tiny_config(**overrides)
    batch = None if m is None else BatchSizes(global_batch=samples, micro_batch=samples // m, microbatches=m)
    return Request(config, gpt.MODEL.make(config, 32), pp, dp=1, tp=1, virtual_stages=virtual_stages, batch=batch)


def test_1f1b_names_gpipe_and_the_smallest_legal_number_of_microbatches():
    (problem,) = pipeline_schedule("1f1b").check(request(pp=5, m=4))
    assert "microbatches=4" in problem.what and "pp=5" in problem.what
    assert problem.suggestion == "microbatches=6, or schedule=gpipe"  # 5 does not divide 48
    assert pipeline_schedule("1f1b").check(request(pp=5, m=6)) == []
    assert pipeline_schedule("gpipe").check(request(pp=5, m=4)) == []


def test_1f1b_without_enough_samples_says_how_many_it_takes():
    (problem,) = pipeline_schedule("1f1b").check(request(pp=4, m=2, samples=2))
    assert problem.suggestion == "global_batch=4, or schedule=gpipe"


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble"])
def test_rounds_of_microbatches_must_be_equal(kind):
    strategy = pipeline_schedule(kind)
    assert (
        strategy.check(request(pp=4, m=4, virtual_stages=2))
        == []
        == strategy.check(request(pp=4, m=3, virtual_stages=2))
    )
    (problem,) = strategy.check(request(pp=4, m=9, virtual_stages=2, samples=18))  # 2 rounds
    assert problem.kind == "arithmetic" and problem.suggestion == "microbatches=6"


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble", "zbv"])
def test_chunks_have_no_meaning_on_one_rank(kind):
    problems = pipeline_schedule(kind).check(request(pp=1, m=4, virtual_stages=2))
    assert [problem.kind for problem in problems] == ["undefined"]


@pytest.mark.parametrize(
    ("kind", "pp", "m", "virtual_stages"),
    [("naive", 2, 2, 1), ("zbv", 2, 4, 3), ("zbv", 2, 4, 1), ("gpipe", 2, 4, 2), ("1f1b", 2, 4, 2), ("none", 2, 4, 1)],
)
def test_what_has_no_meaning_is_refused_with_a_way_out(kind, pp, m, virtual_stages):
    (problem,) = pipeline_schedule(kind).check(request(pp=pp, m=m, virtual_stages=virtual_stages))
    assert problem.kind == "undefined" and problem.suggestion and problem.where


def test_resolve_reports_too_few_microbatches():
    with pytest.raises(ConfigError, match="microbatches=2 are fewer"):
        tiny_plan(pp=4, microbatches=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pp", [2, 4])
def test_messages_are_those_of_a_walk_along_the_model(kind, pp):
    m = 1 if kind == "naive" else 8
    plan = tiny_plan(schedule=kind, pp=pp, microbatches=m, model__layers=8)
    size = plan.batch.micro_batch * 8 * 16 * 4  # seq x hidden x fp32
    sent = {(p, purpose): 0 for p in range(pp) for purpose in ("activations", "gradients")}
    received = dict(sent)
    for before, after in zip(plan.stages, plan.stages[1:]):
        if before.pp_rank != after.pp_rank:
            sent[before.pp_rank, "activations"] += m
            received[after.pp_rank, "activations"] += m
            sent[after.pp_rank, "gradients"] += m
            received[before.pp_rank, "gradients"] += m
    for pp_rank in range(pp):
        rows = {(row.operation, row.purpose): row for row in plan.pipeline.collectives(pp_rank, plan)}
        assert all(row.axis == "pp" and row.calls for row in rows.values())
        for purpose in ("activations", "gradients"):
            send, recv = rows.get(("send", purpose)), rows.get(("recv", purpose))
            assert (send.calls if send else 0) == sent[pp_rank, purpose]
            assert (send.payload_bytes if send else 0) == sent[pp_rank, purpose] * size
            assert (recv.calls if recv else 0) == received[pp_rank, purpose]
            assert recv is None or recv.payload_bytes == 0


def test_the_turn_of_the_v_sends_nothing():
    plan = tiny_plan(schedule="zbv", pp=2, microbatches=4, model__layers=8)
    rows = plan.pipeline.collectives(1, plan)
    assert {(row.operation, row.purpose, row.calls) for row in rows} == {
        (operation, purpose, 4) for operation in ("send", "recv") for purpose in ("activations", "gradients")
    }


def test_the_boundary_shrinks_under_sequence_parallel_and_bf16():
    sizes = {"tp": 2, "pp": 2, "microbatches": 4}
    whole = tiny_plan(sizes)
    sliced = tiny_plan(sizes, strategy__tensor__sequence_parallel=True)
    halved = tiny_plan(sizes, precision__name="bf16")
    payload = [plan.pipeline.collectives(0, plan)[0].payload_bytes for plan in (whole, sliced, halved)]
    assert payload[0] == 2 * payload[1] == 2 * payload[2]


def test_every_kind_has_both_halves():
    kinds = [name.partition(".")[2] for name in registry.names("strategies") if name.startswith("pipeline.")]
    assert set(kinds) == {*KINDS, "none"}
    for kind in kinds:
        assert callable(registry.load("strategies", f"pipeline.{kind}", "runtime").build)
        assert pipeline_schedule(kind).kind == kind
