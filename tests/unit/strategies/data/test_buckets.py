"""Bucket arithmetic: every parameter in exactly one bucket, in the order gradients appear."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelrun.base.layout import Layout
from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.contract.parameters import held_parameters, owns
from parallelrun.planner.contract.request import Request
from parallelrun.planner.model.model_spec import BlockSpec, Initialiser, LayerSpec, ParameterSpec
from parallelrun.strategies.data.common import buckets
from tests.plans import narrow_config, tiny_plan

sizes = st.lists(st.integers(0, 4 * 2**20), max_size=60)


@given(sizes, st.integers(1, 8 * 2**20))
def test_every_parameter_is_in_exactly_one_bucket_in_reverse_order(sizes, limit):
    filled = buckets.fill(sizes, limit)
    assert [index for bucket in filled for index in bucket] == list(reversed(range(len(sizes))))


@given(sizes, st.integers(1, 8 * 2**20))
def test_a_bucket_closes_with_the_parameter_that_reaches_its_limit(sizes, limit):
    for number, bucket in enumerate(buckets.fill(sizes, limit)):
        own = limit if number else min(limit, buckets.FIRST_BUCKET_BYTES)
        assert sum(sizes[index] for index in bucket[:-1]) < own


def test_the_first_bucket_is_small_so_that_the_exchange_starts_early():
    megabyte = 2**20
    filled = buckets.fill([megabyte] * 60, 25 * megabyte)
    assert [len(bucket) for bucket in filled] == [1, 25, 25, 9]
    assert filled[0] == (59,)


def test_nothing_to_reduce_makes_no_bucket():
    assert buckets.fill([], 100) == ()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 2))
def test_padding_makes_equal_chunks_that_hold_everything(shape, parts, dim):
    dim = min(dim, len(shape) - 1)
    padded = buckets.padded_numel(shape, parts, dim)
    assert padded % parts == 0
    assert prod(shape) <= padded < prod(shape) + parts * max(1, prod(shape[:dim]) * prod(shape[dim + 1 :]))


@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "fsdp", "local_sgd", "diloco"])
def test_one_replica_exchanges_nothing(kind):
    plan = tiny_plan(strategy__data__kind=kind)
    assert plan.data.collectives(0, plan.mesh.coordinate(0), plan) == []


def test_a_tied_copy_is_held_by_the_last_stage_under_its_own_name():
    plan = tiny_plan(pp=2)
    first, last = held_parameters(plan, 0), held_parameters(plan, 1)
    assert [p.name for p in last if p.shared] == ["head.head.weight"]
    assert not any(p.shared for p in first)
    assert last[-1].spec is plan.spec.parameters["embedding.tokens.weight"]
    together = tiny_plan()
    assert [p.name for p in held_parameters(together, 0)] == list(together.spec.parameters)


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 4, "tp": 2, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
        {"dp": 2, "tp": 4, "model.kv_heads": 2, "strategy.data.kind": "zero1"},
    ],
    ids=str,
)
def test_one_owner_for_every_element(overrides):
    """Parts that differ never overlap, so owners' sizes add up to the model exactly if each part has one owner."""
    plan = tiny_plan(overrides)
    total = 0
    for rank in range(plan.world):
        coordinate = plan.mesh.coordinate(rank)
        for held in held_parameters(plan, coordinate["pp"]):
            layout = plan.data.state_layout(held.spec, held.layout, plan)
            if not held.shared and owns(layout, plan.mesh, coordinate):
                total += layout.local_numel(held.spec.shape, plan.mesh.sizes, coordinate)
    assert total == plan.spec.num_parameters


def test_a_norm_that_looked_at_pp_would_miss_the_later_stages():
    plan = tiny_plan(pp=2)
    later = plan.mesh.coordinate(1)
    assert owns(Layout.replicated(1), plan.mesh, later)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "fsdp"])
def test_a_parameter_without_dims_cannot_be_split_and_says_so(kind):
    config = narrow_config(dp=2, strategy__data__kind=kind)
    scale = ParameterSpec("scale", (), Initialiser("ones"), "norm")
    layer = LayerSpec("only", "norm", 1, 1, (scale,))
    spec = replace(tiny_plan().spec, blocks=(BlockSpec("only", "head", (layer,), 0.0),))
    (problem,) = data_strategy(kind).check(Request(config, spec, 1, 2, 1, 1, None))
    assert "scale has no dims" in problem.what
    assert "ddp" in problem.suggestion
    assert data_strategy(kind).check(Request(config, spec, 1, 1, 1, 1, None)) == []
