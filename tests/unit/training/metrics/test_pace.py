"""A rank is slow if it computes longer than its like in every step of a window."""

from __future__ import annotations

import random

import pytest

from parallelrun.training.metrics.pace import WINDOW, slow_ranks


def times(*seconds):
    return {rank: [one] * WINDOW for rank, one in enumerate(seconds)}


def test_the_slow_rank_of_four_is_named_with_its_ratio():
    assert slow_ranks(times(0.1, 0.1, 0.16, 0.1), [(0, 1, 2, 3)]) == {2: pytest.approx(1.6)}


def test_of_two_ranks_the_slower_one_is_named():
    assert [*slow_ranks(times(0.1, 0.13), [(0, 1)])] == [1]


def test_less_than_a_fifth_more_is_not_slow():
    assert not slow_ranks(times(0.1, 0.119, 0.1), [(0, 1, 2)])


def test_ranks_of_other_stages_do_other_work():
    assert not slow_ranks(times(0.1, 0.1, 0.3, 0.3), [(0, 1), (2, 3)])


def test_one_fast_step_acquits():
    found = times(0.1, 0.2, 0.1)
    found[1][7] = 0.1
    assert not slow_ranks(found, [(0, 1, 2)])


def test_noise_of_tiny_steps_names_nobody():
    assert not slow_ranks(times(0.001, 0.002), [(0, 1)])


def test_ranks_that_take_turns_on_a_core_are_not_named():
    draw = random.Random(1)
    for _ in range(200):
        found = {rank: [draw.choice((0.1, 0.2, 0.3)) for _ in range(WINDOW)] for rank in range(4)}
        assert not slow_ranks(found, [(0, 1, 2, 3)])


def test_a_rank_without_its_like_is_not_compared():
    assert not slow_ranks(times(0.1, 9.0), [(0,), (1,)])
