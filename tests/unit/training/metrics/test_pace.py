"""A rank is slow if it computes longer than its like in every step of a window."""

from __future__ import annotations

import random

import pytest

from parallelrun.training.metrics.pace import WINDOW, slow_ranks


def times(*seconds):
    return {rank: [one] * WINDOW for rank, one in enumerate(seconds)}


@pytest.mark.parametrize(
    ("seconds", "groups", "slow"),
    [
        ((0.1, 0.1, 0.16, 0.1), [(0, 1, 2, 3)], {2: 1.6}),
        ((0.1, 0.13), [(0, 1)], {1: 1.3}),
        ((0.1, 0.119, 0.1), [(0, 1, 2)], {}),  # less than a fifth more
        ((0.1, 0.1, 0.3, 0.3), [(0, 1), (2, 3)], {}),  # ranks of other stages do other work
        ((0.001, 0.002), [(0, 1)], {}),  # noise of tiny steps
        ((0.1, 9.0), [(0,), (1,)], {}),  # nobody to compare with
    ],
)
def test_a_rank_is_slow_if_it_takes_a_fifth_longer_than_those_with_the_same_work(seconds, groups, slow):
    assert slow_ranks(times(*seconds), groups) == pytest.approx(slow)


def test_one_fast_step_acquits():
    found = times(0.1, 0.2, 0.1)
    found[1][7] = 0.1
    assert not slow_ranks(found, [(0, 1, 2)])


def test_ranks_that_take_turns_on_a_core_are_not_named():
    draw = random.Random(1)
    for _ in range(200):
        found = {rank: [draw.choice((0.1, 0.2, 0.3)) for _ in range(WINDOW)] for rank in range(4)}
        assert not slow_ranks(found, [(0, 1, 2, 3)])
