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

KINDS = ["naive", "gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]


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


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble", "zbv", "dualpipev"])
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


def test_every_kind_has_both_halves():
    kinds = [name.partition(".")[2] for name in registry.names("strategies") if name.startswith("pipeline.")]
    assert set(kinds) == {*KINDS, "none"}
    for kind in kinds:
        assert callable(registry.load("strategies", f"pipeline.{kind}", "runtime").build)
        assert pipeline_schedule(kind).kind == kind


@pytest.mark.parametrize(
    ("pp", "layers", "numbers"),
    [(16, 126, [2, 4, 8]), (16, 128, [2, 4, 8]), (4, 12, [3]), (4, 13, [2]), (4, 14, [2, 4]), (8, 12, []), (8, 6, [])],
)
def test_a_search_tries_stages_of_equally_many_layers_or_a_layer_less_on_the_outer_ones(pp, layers, numbers):
    assert pipeline_schedule("interleaved").choices(pp, layers) == numbers
