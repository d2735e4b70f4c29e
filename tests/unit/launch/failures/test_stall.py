"""Which operation does not end and who has not come, from the positions of all ranks; what a rank says of itself."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from parallelrun.base.context import PendingCollective
from parallelrun.base.records import typed
from parallelrun.launch.failures import stall
from parallelrun.launch.host import position
from parallelrun.launch.host.position import COMPUTES, SILENT, SLEEPS, STOPPED, WAITS, Position
from parallelrun.planner.contract.mesh_shape import MeshShape

MESH = MeshShape((("pp", 1), ("dp", 2), ("tp", 2)))
ALL, TP = (0, 1, 2, 3), (2, 3)
SLEEPING = Position(SLEEPS, ("net.py:7 in forward: time.sleep(9)",), None, {"world": 11, "tp": 16})


def waits(group: str, ranks: tuple[int, ...], number: int, operation: str = "all_reduce", **more) -> Position:
    """A rank that waits in a collective."""
    wait = PendingCollective(group, ranks, operation, number, 4096, **more)
    return Position(WAITS, ("step.py:3 in add: f()",), wait, {group: number})


def found(positions: dict[int, Position]) -> stall.StalledOperation:
    result = stall.find(positions, MESH, Path("/run"), dict.fromkeys(ALL, "host"))
    assert result is not None and typed(stall.StalledOperation, json.loads(json.dumps(asdict(result)))) == result
    return result


def missing(result: stall.StalledOperation) -> list[int]:
    return [one.rank for one in result.missing]


def test_a_rank_that_has_issued_fewer_collectives_has_not_come():
    result = found({rank: SLEEPING if rank == 2 else waits("world", ALL, 12) for rank in ALL})
    assert missing(result) == [2] and result.arrived == (0, 1, 3)
    assert result.reason == "sleeps in forward (net.py:7), and has not come to all_reduce 12 of axis world"
    assert result.lines() == [
        "  stalled: all_reduce 12 of axis world (ranks 0, 1, 2, 3), 4,096 bytes, called at step.py:3 in add: f()",
        "  arrived: ranks 0, 1, 3; not arrived: rank 2",
        "  rank 2 (host) sleeps; log: /run/logs/rank_2.log",
        "    in: net.py:7 in forward: time.sleep(9)",
    ]


def test_a_victim_that_waits_elsewhere_is_not_blamed():
    """Rank 3 waits for rank 2 over tp, so that it does not come to the others either."""
    tp = waits("tp", TP, 17, "all_gather")
    result = found({0: waits("world", ALL, 12), 1: waits("world", ALL, 12), 2: SLEEPING, 3: tp})
    assert missing(result) == [2]


def test_ranks_that_wait_for_each_other_are_a_mismatch_with_both_operations():
    elsewhere = waits("tp", TP, 17, "all_gather")
    result = found({rank: elsewhere if rank == 2 else waits("world", ALL, 12) for rank in ALL})
    assert missing(result) == [2]
    assert result.reason == "rank 2 in all_gather 17 of axis tp, ranks 0, 1, 3 in all_reduce 12 of axis world"
    assert (
        "  rank 2 (host) waits for other ranks: all_gather 17 of axis tp; log: /run/logs/rank_2.log" in result.lines()
    )


@pytest.mark.parametrize("other", [waits("world", ALL, 13), waits("world", ALL, 12, "broadcast")])
def test_ranks_of_a_group_that_are_at_different_collectives_are_a_mismatch(other):
    result = found({rank: other if rank == 1 else waits("world", ALL, 12) for rank in ALL})
    assert missing(result) == [1]


def test_a_stopped_rank_counts_as_missing_unless_shared_memory_shows_its_part():
    positions = {rank: Position(STOPPED) if rank == 2 else waits("world", ALL, 12) for rank in ALL}
    assert missing(found(positions)) == [2]
    sender = Position(STOPPED)
    ring = {0: waits("tp", TP, 0, "recv", missing=(3,)), 3: sender}
    assert missing(found(ring)) == [3] and found(ring).name == "recv of axis tp"
    has_come = {rank: Position(STOPPED) if rank == 2 else waits("world", ALL, 12, missing=(3,)) for rank in ALL}
    assert stall.find(has_come, MESH, Path("/run"), {}) is None


def test_a_rank_that_sleeps_is_not_blamed_while_another_is_stopped():
    """Ranks 1 and 2 sleep until their checkpoint is written, which rank 3, stopped, keeps from its end."""
    asleep = {1: SLEEPING, 2: SLEEPING, 3: Position(STOPPED)}
    ahead = waits("tp", (0, 1), 17)
    assert stall.find({0: ahead, **asleep}, MESH, Path("/run"), {}) is None
    assert missing(found({**asleep, 0: ahead, 2: waits("tp2", TP, 17)})) == [3]


def test_a_rank_that_has_issued_the_collective_has_come():
    """It waits by something of its own, such as a handle of the collective."""
    has_issued = Position(SLEEPS, (), None, {"world": 12})
    assert (
        stall.find({rank: has_issued if rank == 2 else waits("world", ALL, 12) for rank in ALL}, MESH, Path(), {})
        is None
    )


def test_positions_that_do_not_tell_are_no_stall():
    assert stall.find({0: SLEEPING, 1: SLEEPING}, MESH, Path("/run"), {}) is None
    assert stall.find({rank: waits("world", ALL, 12) for rank in ALL}, MESH, Path("/run"), {}) is None


WAITING = f'''Thread 0x1 (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{__file__}", line 1 in train
'''
ELSEWHERE = f'''Current thread 0x2 (most recent call first):
  File "/data/reader.py", line 7 in read_next
  File "{__file__}", line 1 in train
'''


def test_the_stacks_of_a_rank_that_does_not_answer_tell_whether_it_is_in_a_collective():
    assert position.of_dump(WAITING).in_collective
    assert not position.of_dump(ELSEWHERE).in_collective
    assert position.of_dump(ELSEWHERE).text == "holds Python's lock in native code in read_next (/data/reader.py:7)"
    assert position.of_dump("") == Position(SILENT)


@pytest.mark.parametrize(
    ("at", "guilty", "why"),
    [
        ({0: WAITING, 1: ELSEWHERE, 2: WAITING}, [1], "not in a collective: holds Python's lock"),
        ({0: WAITING, 1: "", 2: WAITING}, [1], "does not answer"),
        ({0: WAITING, 1: WAITING}, [], ""),
        ({0: ELSEWHERE, 1: ELSEWHERE}, [], ""),
    ],
)
def test_the_rank_that_is_not_where_the_others_are_is_the_suspect(at, guilty, why):
    suspects, reason = stall.suspects({rank: position.of_dump(dump) for rank, dump in at.items()})
    assert suspects == guilty and why in reason


def test_a_stopped_rank_is_suspected_before_all():
    assert stall.suspects({0: Position(STOPPED), 1: SLEEPING}) == ([0], STOPPED)


def spin() -> None:
    until = time.perf_counter() + 5
    while threading.active_count() > 1 and time.perf_counter() < until:
        pass


def compute() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 4_000_000)  # seconds, without Python's lock


def sleep() -> None:
    time.sleep(1.5)


def wait() -> None:
    threading.Event().wait(1.5)


@pytest.mark.parametrize(("does", "expected"), [(spin, COMPUTES), (compute, COMPUTES), (sleep, SLEEPS), (wait, SLEEPS)])
def test_a_rank_says_what_it_does_and_where(does, expected):
    told: list[Position] = []

    def look() -> None:
        time.sleep(0.05)
        told.append(position.own_position())

    looking = threading.Thread(target=look)
    looking.start()
    does()
    looking.join()
    assert told[0].activity == expected and "test_stall.py" in told[0].frames[0]
    assert told[0].in_collective == (does is wait) and f"{expected} in {does.__name__} (" in told[0].text
    assert typed(Position, json.loads(json.dumps(asdict(told[0])))) == told[0]
