"""The order of samples depends on (seed, step, place) only: never on the plan, never on numpy's generators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.data.order import Sampler, permute

sizes = st.integers(1, 3000)
PINNED_FIRST = [62, 82, 95, 49, 13, 36, 14, 86]
PINNED_OVER_AN_EPOCH = [18, 8, 23, 40, 50, 32, 33, 55]


@settings(max_examples=150, deadline=None)
@given(length=sizes, key=st.integers(0, 2**64 - 1))
def test_every_epoch_is_a_permutation(length, key):
    assert sorted(permute(np.arange(length), length, key).tolist()) == list(range(length))


@settings(max_examples=100, deadline=None)
@given(samples=sizes, per_replica=st.integers(1, 6), dp=st.integers(1, 8), seed=st.integers(0, 2**31), step=sizes)
def test_replicas_together_read_the_global_batch_of_one_device(samples, per_replica, dp, seed, step):
    batch = per_replica * dp
    sampler = Sampler(samples, batch, seed)
    whole, whole_ids = sampler.indices(step, 0, batch)
    parts = [Sampler(samples, batch, seed).indices(step, c * per_replica, (c + 1) * per_replica) for c in range(dp)]
    assert np.array_equal(whole, np.concatenate([indices for indices, _ in parts]))
    assert np.array_equal(whole_ids, np.concatenate([ids for _, ids in parts]))
    assert whole_ids.tolist() == list(range((step - 1) * batch, step * batch))


def test_an_incomplete_last_batch_joins_the_next_epoch():
    sampler = Sampler(num_samples=10, global_batch=4, seed=7)
    stream = np.concatenate([sampler.indices(step, 0, 4)[0] for step in range(1, 6)])
    assert sorted(stream[:10].tolist()) == sorted(stream[10:].tolist()) == list(range(10))
    assert stream[:10].tolist() != stream[10:].tolist()


def test_seeds_and_epochs_give_unrelated_orders():
    orders = {tuple(Sampler(50, 50, seed).indices(step, 0, 50)[0].tolist()) for seed in range(20) for step in (1, 2, 3)}
    assert len(orders) == 60


def test_places_are_uniform():
    landed = np.zeros((10, 10))
    for key in range(1000):
        landed[np.arange(10), permute(np.arange(10), 10, key)] += 1
    chi_square = ((landed - 100) ** 2 / 100).sum()
    assert chi_square < 81 + 5 * (2 * 81) ** 0.5  # 81 degrees of freedom, five standard deviations


def test_neighbours_are_not_kept_together():
    order = permute(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_a_huge_dataset_needs_no_memory_and_no_time():
    length = 10**15 + 7
    indices, ids = Sampler(length, 48, 1).indices(10**9, 40, 48)
    assert len(set(indices.tolist())) == 8 and indices.min() >= 0 and indices.max() < length
    assert ids[0] == (10**9 - 1) * 48 + 40


def test_the_order_is_pinned():
    """A change here breaks the exact resume of every run made before it."""
    assert Sampler(100, 8, 1234).indices(1, 0, 8)[0].tolist() == PINNED_FIRST
    assert Sampler(100, 8, 1234).indices(13, 0, 8)[0].tolist() == PINNED_OVER_AN_EPOCH


def test_without_shuffling_samples_come_in_order():
    assert Sampler(5, 4, 0, shuffle=False).indices(2, 0, 4)[0].tolist() == [4, 0, 1, 2]


@pytest.mark.parametrize("step, start, stop", [(0, 0, 1), (1, 0, 5), (1, -1, 2), (1, 3, 2)])
def test_places_outside_the_batch_are_refused(step, start, stop):
    with pytest.raises(ValueError, match="outside a global batch of 4"):
        Sampler(10, 4, 0).indices(step, start, stop)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="0 samples"):
        Sampler(0, 4, 0)
