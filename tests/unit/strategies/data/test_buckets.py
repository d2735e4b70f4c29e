"""Bucket arithmetic: every parameter in exactly one bucket, in the order gradients appear."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelrun.strategies.data.common import buckets
from tests.plans import tiny_plan

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
