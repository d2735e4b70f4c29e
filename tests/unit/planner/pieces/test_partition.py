"""Stages: the exact min-max partition, the uniform one and the manual one."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.errors import ConfigError
from parallelrun.planner.model.model_spec import BlockSpec, ModelSpec
from parallelrun.planner.pieces.partition import cut, partition
from tests.matrix import examples
from tests.plans import tiny_config, tiny_plan


def every_partition(costs, num_stages):
    for cuts in combinations(range(1, len(costs)), num_stages - 1):
        bounds = [0, *cuts, len(costs)]
        yield [stop - start for start, stop in pairwise(bounds)]


def loads(costs, sizes):
    out, start = [], 0
    for size in sizes:
        out.append(sum(costs[start : start + size]))
        start += size
    return out


@settings(max_examples=examples(300), deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_partition_has_a_lighter_heaviest_stage_nor_a_smaller_sum_of_squares(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    sizes = partition([float(cost) for cost in costs], num_stages)
    assert len(sizes) == num_stages and sum(sizes) == len(costs) and min(sizes) >= 1
    best = min((max(loads(costs, s)), sum(x * x for x in loads(costs, s))) for s in every_partition(costs, num_stages))
    found = loads(costs, sizes)
    assert (max(found), sum(x * x for x in found)) == best


def test_a_heavy_head_gets_a_stage_of_its_own():
    assert partition([0.0, 1, 1, 1, 1, 4], 2) == [5, 1]


def blocks(**overrides):
    return [stage.blocks for stage in tiny_plan(**overrides).stages]


def test_uniform_gives_every_stage_as_many_layers():
    assert blocks(pp=2, strategy__pipeline__partition="uniform") == [
        ("embedding", "layers.0", "layers.1"),
        ("layers.2", "layers.3", "head"),
    ]


def test_uniform_leaves_a_head_of_several_blocks_to_the_last_stage():
    layers = [BlockSpec(f"layers.{index}", "transformer", (), 1.0) for index in range(4)]
    ends = [BlockSpec(name, kind, (), 1.0) for name, kind in (("embedding",) * 2, ("norm", "head"), ("head",) * 2)]
    spec = ModelSpec("x", "tokens", (ends[0], *layers, *ends[1:]), (8,), (8, 4), 8, 4, seq=8)
    stages, problems = cut(spec, tiny_config(strategy__pipeline__partition="uniform"), 4)
    assert stages == [("embedding", "layers.0"), ("layers.1",), ("layers.2",), ("layers.3", "norm", "head")]
    assert not problems


def test_uniform_refuses_layers_that_do_not_divide():
    with pytest.raises(ConfigError) as caught:
        tiny_plan(pp=3, strategy__pipeline__partition="uniform")
    (problem,) = caught.value.problems
    assert "4 layers are not divisible by 3 stages" in problem.what and "1, 2, 4" in problem.what


def test_manual_cuts_name_the_first_block_of_every_later_stage():
    assert blocks(pp=3, strategy__pipeline__split=["layers.0", "head"]) == [
        ("embedding",),
        ("layers.0", "layers.1", "layers.2", "layers.3"),
        ("head",),
    ]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (["layers.9"], "no block 'layers.9'"),
        (["layers.1", "layers.2"], "2 stages need 1 cuts"),
        (["embedding"], "not in model order"),
    ],
)
def test_manual_cuts_that_make_no_stages_are_refused(split, message):
    with pytest.raises(ConfigError) as caught:
        tiny_plan(pp=2, strategy__pipeline__split=split)
    problem = caught.value.problems[0]
    assert message in problem.what
    key, _, value = problem.suggestion.partition("=")
    assert key == "strategy.pipeline.split" and len(blocks(pp=2, strategy__pipeline__split=value[1:-1].split(","))) == 2


def test_cuts_that_only_lack_order_are_suggested_in_order():
    with pytest.raises(ConfigError) as caught:
        tiny_plan(pp=3, strategy__pipeline__split=["layers.3", "layers.1"])
    assert caught.value.problems[0].suggestion == "strategy.pipeline.split=[layers.1,layers.3]"


def test_an_embedding_and_a_head_may_be_stages_of_their_own():
    """Llama 3 405B: 126 layers on 16 ranks with 8 stages each (Llama Team 2024, 3.3.2)."""
    sizes = {"pp": 16, "model__layers": 126, "schedule": "interleaved", "microbatches": 16, "global_batch": 16}
    alone = blocks(**sizes, virtual_stages=8)
    assert len(alone) == 128 and (alone[0], alone[-1]) == (("embedding",), ("head",))
    uneven = blocks(**sizes, virtual_stages=7)
    of_ranks = [sum(len(stage) for stage in uneven[rank::16]) for rank in range(16)]
    assert len(uneven) == 112 and of_ranks == [8] * 16, "embedding and head count as a layer each"
    with pytest.raises(ConfigError, match="144 stages, and the model has 126 layers to cut between"):
        blocks(**sizes, virtual_stages=9)
