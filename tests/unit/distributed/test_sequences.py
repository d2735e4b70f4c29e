"""Sequences of collectives: what is a difference, what is only a rank that is behind, and how it is told."""

from __future__ import annotations

from pathlib import Path

from parallelrun.distributed.sequences import (
    CollectiveSequence,
    Lane,
    SequenceFile,
    first_mismatch,
    parse,
    path_of,
    read_all,
)

TP = Lane("tp", (0, 1))
DP = Lane("dp", (0, 1, 2))


def issued(lane: Lane, *what: str, step: int = 1, ended: int = 0) -> CollectiveSequence:
    return CollectiveSequence({lane: [(step, one) for one in what]}, ended)


def test_a_file_gives_back_what_was_noted(tmp_path: Path) -> None:
    message = Lane("pp", (0, 4), "activations")
    file = SequenceFile(tmp_path, 4)
    file.begin(7)
    file.note(TP, "all_reduce (sum) of float32 2x3 (24 bytes), activations")
    file.note(message, "a message of float32 4 (16 bytes), activations")
    file.end(7)
    file.begin(8)
    file.note(TP, "broadcast")
    assert read_all(tmp_path) == {
        4: CollectiveSequence(
            {
                TP: [(7, "all_reduce (sum) of float32 2x3 (24 bytes), activations"), (8, "broadcast")],
                message: [(7, "a message of float32 4 (16 bytes), activations")],
            },
            ended=7,
        )
    }
    file.remove()
    assert read_all(tmp_path) == {} and not path_of(tmp_path, 4).exists()


def test_a_line_that_a_kill_has_cut_off_is_left_out() -> None:
    whole = "step 1\nlane 0 tp 0,1 \n0 all_reduce\n"
    assert parse(whole + "0 all_red") == parse(whole) == issued(TP, "all_reduce")


def test_equal_sequences_and_ranks_that_are_behind_are_no_mismatch() -> None:
    assert first_mismatch({0: issued(TP, "a", "b", ended=1), 1: issued(TP, "a", "b", ended=1)}) is None
    assert first_mismatch({0: issued(TP, "a", "b", ended=1), 1: issued(TP, "a")}) is None
    assert first_mismatch({0: issued(TP, "a"), 1: CollectiveSequence()}) is None
    assert first_mismatch({0: issued(TP, "a")}) is None and first_mismatch({}) is None


def test_another_collective_at_the_same_place_is_found_with_place_and_texts() -> None:
    found = first_mismatch({0: issued(TP, "a", "b", "c"), 1: issued(TP, "a", "c")})
    assert found is not None
    assert (found.lane, found.step, found.number, found.by_rank) == (TP, 1, 2, {0: "b", 1: "c"})
    assert "over tp (ranks 0, 1); collective 2 is: rank 0: b; rank 1: c" in found.problem().what


def test_a_rank_that_has_ended_the_step_without_it_differs() -> None:
    found = first_mismatch({0: issued(TP, "a", "b"), 1: issued(TP, "a", ended=1)})
    assert found is not None and found.number == 2
    assert "rank 0: b; rank 1: nothing (it has ended the step)" in found.problem().what
    nothing_at_all = first_mismatch({0: issued(TP, "a"), 1: CollectiveSequence(ended=1)})
    assert nothing_at_all is not None and nothing_at_all.number == 1


def test_a_rank_that_pairs_with_the_next_step_differs() -> None:
    ahead = CollectiveSequence({TP: [(1, "a"), (2, "a")]}, ended=1)
    found = first_mismatch({0: ahead, 1: issued(TP, "a", "a")})
    assert found is not None and (found.step, found.number) == (1, 2)
    assert found.by_rank == {0: "a, of step 2", 1: "a"}


def test_whoever_differs_from_the_most_is_suspected() -> None:
    found = first_mismatch({0: issued(DP, "a"), 1: issued(DP, "b"), 2: issued(DP, "a")})
    assert found is not None and found.suspects == (1,)
    assert "ranks 0, 2: a; rank 1: b" in found.problem().what
    undecided = first_mismatch({0: issued(TP, "a"), 1: issued(TP, "b")})
    assert undecided is not None and undecided.suspects == (0, 1)


def test_the_earliest_step_is_told() -> None:
    mine = CollectiveSequence({TP: [(2, "x")], DP: [(1, "y")]})
    other = CollectiveSequence({TP: [(2, "z")], DP: [(1, "z")]})
    found = first_mismatch({0: mine, 1: other})
    assert found is not None and found.lane == DP
    only = first_mismatch({0: mine, 1: other}, [TP])
    assert only is not None and only.lane == TP
