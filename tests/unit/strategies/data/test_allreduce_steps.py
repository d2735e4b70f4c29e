"""The rounds of the written-out all-reduces, executed on plain lists: no process, no torch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from parallelrun.base.wording import divisors
from parallelrun.strategies.data.common.allreduce.algorithm import Algorithm, Counts
from parallelrun.strategies.data.common.allreduce.rings import HierarchicalAllReduce, RingAllReduce
from parallelrun.strategies.data.common.allreduce.rounds import ALL_GATHER, SCATTER_REDUCE, Rounds
from parallelrun.strategies.data.common.allreduce.trees import HalvingDoubling, TreeAllReduce


def tables(algorithm: Algorithm, size: int, numel: int) -> list[Rounds]:
    return [algorithm.rounds(size, index, numel) for index in range(size)]


def execute(ranks: list[Rounds], numel: int) -> list[list[Counter[int]]]:
    """Per rank and element, how often each rank's own value is in it after all rounds, every round at once.

    Fails if two ends of a message do not agree about it.
    """
    held = [[Counter([index]) for _ in range(numel)] for index in range(len(ranks))]
    for together in zip(*ranks, strict=True):
        before = [[value.copy() for value in values] for values in held]
        for index, one in enumerate(together):
            if one.send:
                answer = together[one.send.peer].receive
                assert answer == (index, one.send.start, one.send.stop), "the peer expects something else"
            if one.receive:
                peer, start, stop = one.receive
                assert together[peer].send == (index, start, stop), "the peer sends something else"
                for i in range(start, stop):
                    value = before[peer][i]
                    held[index][i] = held[index][i] + value if one.phase == SCATTER_REDUCE else value
    return held


@st.composite
def cases(draw: st.DrawFn, largest: int = 11) -> tuple[Algorithm, int, int]:
    """(algorithm, size, numel): sizes that are no powers of two, fewer elements than ranks, none at all."""
    size = draw(st.integers(1, largest))
    in_groups = HierarchicalAllReduce(draw(st.sampled_from(divisors(size))))
    algorithm = draw(st.sampled_from([RingAllReduce(), HalvingDoubling(), TreeAllReduce(), in_groups]))
    return algorithm, size, draw(st.integers(0, 30))


@given(cases())
@settings(deadline=None, max_examples=60)
def test_every_rank_ends_with_every_value_exactly_once(case):
    algorithm, size, numel = case
    everyone = Counter(range(size))
    for values in execute(tables(algorithm, size, numel), numel):
        assert all(value == everyone for value in values)


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_two_phases_do_not_mix_and_each_sum_is_made_once(case):
    """Rounds that add come first, and each element's sum is finished on one rank: all get the same bits."""
    algorithm, size, numel = case
    ranks = tables(algorithm, size, numel)
    for rounds in ranks:
        phases = [one.phase for one in rounds]
        assert phases == sorted(phases, key=[SCATTER_REDUCE, ALL_GATHER].index)
    adding = [tuple(one for one in rounds if one.phase == SCATTER_REDUCE) for rounds in ranks]
    finished = [
        [index for index, values in enumerate(execute(adding, numel)) if values[i] == Counter(range(size))]
        for i in range(numel)
    ]
    assert all(len(owners) == 1 for owners in finished)


@given(cases())
@settings(deadline=None, max_examples=60)
def test_closed_forms_count_the_rounds_and_the_longest_message_that_is_added(case):
    algorithm, size, numel = case
    for index, rounds in enumerate(tables(algorithm, size, numel)):
        added = [one.receive.numel for one in rounds if one.receive and one.phase == SCATTER_REDUCE]
        assert algorithm.longest_added(size, index, numel) == max(added, default=0)
        assert algorithm.counts(size, index, numel) == Counts(
            sum(one.send is not None for one in rounds),
            sum(one.send.numel for one in rounds if one.send),
            sum(one.receive is not None for one in rounds),
        )


def test_one_inner_group_or_groups_of_one_are_a_ring():
    for group_size in (1, 6):
        assert tables(HierarchicalAllReduce(group_size), 6, 50) == tables(RingAllReduce(), 6, 50)
