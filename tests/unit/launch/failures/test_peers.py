"""Which rank of another launcher has failed, on which of two hosts, and which survivor reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelrun.launch.failures import failure, peers
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.peers import Peers
from parallelrun.launch.store.rendezvous import Member

HOSTS = ("a", "a", "b", "b")


def seen_from(rank: int, folder: Path) -> Peers:
    """What a rank sees of four ranks on two hosts: the processes of its own host."""
    members = [Member(one, host, 10 + one, f"born {one}", {}, {}, "", "", True) for one, host in enumerate(HOSTS)]
    return Peers(rank, folder, members, frozenset(one for one, host in enumerate(HOSTS) if host == HOSTS[rank]))


@pytest.fixture
def gone(monkeypatch) -> set[int]:
    """Ranks whose processes have exited; no rank is waited for."""
    exited: set[int] = set()
    monkeypatch.setattr(peers, "start_time", lambda pid: "" if pid - 10 in exited else f"born {pid - 10}")
    monkeypatch.setattr(peers, "is_stopped", lambda pid: False)
    monkeypatch.setattr(peers, "SURVIVORS_S", 0.0)
    return exited


def victim(rank: int, **more: Any) -> Failure:
    return Failure(rank, "lost its peers", 6, order=failure.LOST_PEER, **more)


def test_a_rank_tells_which_rank_of_its_host_has_died(tmp_path, gone):
    gone.add(3)
    ((rank, how),) = seen_from(2, tmp_path).lost()
    assert rank == 3 and how.startswith("died: ")
    assert seen_from(0, tmp_path).lost() == (), "it cannot see the other host"


def test_a_stopped_rank_is_told_by_its_neighbour(tmp_path, gone, monkeypatch):
    monkeypatch.setattr(peers, "is_stopped", lambda pid: pid == 10)
    assert seen_from(1, tmp_path).lost()[0][1].startswith("stopped (SIGSTOP)")


def test_rank_0_blames_the_rank_that_another_host_has_seen_die_and_not_one_that_is_late(tmp_path, gone):
    gone.add(3)
    failure.write_failure(tmp_path, victim(2, lost=seen_from(2, tmp_path).lost()))
    found = seen_from(0, tmp_path).cause(victim(0))  # rank 1 has not written yet
    assert (found.rank, found.host, found.pid, found.exit_code) == (3, "b", 13, 6)


def test_a_host_that_is_silent_as_a_whole_is_blamed(tmp_path, gone):
    failure.write_failure(tmp_path, victim(1))
    found = seen_from(0, tmp_path).cause(victim(0))
    assert (found.rank, found.host) == (2, "b") and found.what.startswith("died, or its host was cut off: ")


def test_a_failure_that_its_own_rank_tells_comes_before_what_others_have_seen(tmp_path, gone):
    gone.add(3)
    failure.write_failure(tmp_path, Failure(1, "ValueError", 6))
    failure.write_failure(tmp_path, victim(2, lost=seen_from(2, tmp_path).lost()))
    assert seen_from(0, tmp_path).cause(victim(0)).rank == 1


def test_one_survivor_reports_for_a_silent_rank_0(tmp_path, gone, monkeypatch):
    monkeypatch.setattr(peers, "LEADER_S", 0.0)
    for rank in (1, 2, 3):
        failure.write_failure(tmp_path, victim(rank))
    monkeypatch.setattr(peers, "is_stopped", lambda pid: pid == 10)
    assert [seen_from(rank, tmp_path).must_report(victim(rank)) for rank in (1, 2, 3)] == [True, False, False]
