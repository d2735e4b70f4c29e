"""Timeouts and grace periods of the launcher, with a fake clock: nothing happens before its time, and nothing later.

No process and no waiting: what a slow machine cannot shorten or lengthen. The times are written out here, not read from
the code, because a wrong constant is what these tests look for.
"""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallelrun.base.errors import EXIT_HANG, EnvironmentProblem
from parallelrun.launch.entry import attach
from parallelrun.launch.failures import failure, hang, watchdog
from parallelrun.launch.failures import peers as peers_module
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.peers import Peers
from parallelrun.launch.host import directory, heartbeat, os_process
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import rank, supervisor
from parallelrun.launch.ranks.supervisor import Supervisor
from parallelrun.launch.store import rendezvous, stores
from parallelrun.launch.store.rendezvous import Member
from tests.plans import tiny_config, tiny_plan
from tests.unit.launch.clock import Clock

TIMEOUT_S = 7.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    core = (directory, heartbeat, failure, rendezvous, supervisor)
    for module in (*core, peers_module, hang, attach):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def ranks(monkeypatch, tmp_path, clock) -> Supervisor:
    """The supervisor of two ranks that are no processes; `sent` are the signals that it sends them, with the time."""
    job = Job(tiny_config(dp=2, timeout_s=TIMEOUT_S), tiny_plan(dp=2), tmp_path)
    found = Supervisor(job)
    (tmp_path / "logs").mkdir()
    for number in range(2):
        (tmp_path / "logs" / f"rank_{number}.log").touch()
    found._pids, found._alive = [11, 12], {0: 11, 1: 12}
    found.sent = []
    monkeypatch.setattr(os_process, "kill", lambda pid, number: found.sent.append((pid, number, clock.now)))
    monkeypatch.setattr(os_process, "is_stopped", lambda pid: False)
    return found


def pass_time(ranks: Supervisor, clock: Clock, seconds: float, beats: tuple[int, ...] = ()) -> None:
    """The loop's ticks of the next `seconds`; the ranks of `beats` go on meanwhile."""
    end = clock.now + seconds
    while clock.now < end - 1e-9:
        clock.now = min(end, clock.now + 0.25)
        for one in beats:
            ranks._heartbeats.beat(one, 1, "step")
        ranks._tick()


def killed_after(ranks: Supervisor, began: float) -> float:
    """Seconds from `began` to the first SIGKILL."""
    return min(when for _, number, when in ranks.sent if number == signal.SIGKILL) - began


def test_a_hang_is_noticed_at_the_timeout_and_not_before(ranks, clock):
    began = clock.now
    pass_time(ranks, clock, TIMEOUT_S, beats=(0,))
    assert not ranks._failures
    pass_time(ranks, clock, 0.25, beats=(0,))
    (cause,) = ranks._failures
    assert (cause.rank, cause.exit_code) == (1, EXIT_HANG)
    assert f"no progress for {TIMEOUT_S:g} s" in cause.what
    assert sum(clock.slept) == pytest.approx(3.0, abs=0.06)  # for ranks to tell their positions, at most
    assert killed_after(ranks, began) == pytest.approx(TIMEOUT_S + 0.25 + 3.0, abs=0.06)  # at once


def test_ranks_that_go_on_are_never_a_hang(ranks, clock):
    pass_time(ranks, clock, 5 * TIMEOUT_S, beats=(0, 1))
    assert not ranks._failures and not ranks.sent


def test_after_a_failure_the_others_have_one_second_to_tell_theirs_and_a_second_one_gives_no_more(ranks, clock):
    began = clock.now
    ranks._fail(1, 3, clock.monotonic_ns())
    pass_time(ranks, clock, 0.75)
    assert not ranks.sent
    ranks._fail(0, 3, clock.monotonic_ns())
    pass_time(ranks, clock, 1.0)
    assert killed_after(ranks, began) == pytest.approx(1.0)


def test_ctrl_c_leaves_three_seconds_to_unwind_and_a_second_one_none(ranks, clock):
    began = clock.now
    ranks._on_signal(signal.SIGINT)
    assert [(pid, number) for pid, number, _ in ranks.sent] == [(11, signal.SIGINT), (12, signal.SIGINT)]
    pass_time(ranks, clock, 2.75)
    assert len(ranks.sent) == 2
    pass_time(ranks, clock, 0.25)
    assert killed_after(ranks, began) == pytest.approx(3.0)
    ranks.sent.clear()
    ranks._on_signal(signal.SIGINT)
    ranks._tick()
    assert killed_after(ranks, clock.now) == 0.0


def test_sigterm_gives_all_the_time_that_a_step_and_a_save_need(ranks, clock):
    ranks._on_signal(signal.SIGTERM)
    pass_time(ranks, clock, 5 * TIMEOUT_S, beats=(0, 1))
    assert not ranks.sent and ranks._heartbeats.stop_requested()


def test_the_first_collectives_are_compared_after_two_silent_seconds_and_every_two_seconds(ranks, clock, monkeypatch):
    looked = []
    monkeypatch.setattr(failure, "of_mismatch", lambda directory: looked.append(clock.now))
    began = clock.now
    pass_time(ranks, clock, 6.0, beats=(0,))
    assert [when - began for when in looked] == pytest.approx([2.0, 4.0, 6.0])


def test_the_first_collectives_are_not_compared_while_ranks_issue_more_but_at_last_they_are(ranks, clock, monkeypatch):
    looked, began = [], clock.now
    monkeypatch.setattr(failure, "of_mismatch", lambda directory: looked.append(clock.now - began))
    monkeypatch.setattr("parallelrun.distributed.sequences.num_bytes", lambda directory: min(5.0, clock.now - began))
    monkeypatch.setattr(supervisor, "LATEST_LOOK_S", 4.0)
    pass_time(ranks, clock, 7.5, beats=(0,))
    assert looked == pytest.approx([4.25, 7.0])


def test_the_status_is_written_every_two_seconds(ranks, clock, monkeypatch):
    written = []
    monkeypatch.setattr(ranks._status, "running", lambda *_: written.append(clock.now))
    began = clock.now
    pass_time(ranks, clock, 6.25, beats=(0, 1))
    assert [when - began for when in written] == pytest.approx([0.25, 2.25, 4.25, 6.25])


class Ended(Exception):
    """What stands in for the end of the process."""


def test_an_attached_or_inline_rank_notices_its_hang_at_the_timeout(tmp_path, monkeypatch, clock):
    own, told = heartbeat.HeartbeatFile(1), []

    def wait(seconds: float) -> bool:
        clock.now += seconds
        return False

    def leave(code: int) -> None:
        raise Ended(code)

    log = (tmp_path / "log").open("w")
    watcher = watchdog.Watchdog(own, 0, TIMEOUT_S, log, told.append, None)
    watcher.done = SimpleNamespace(wait=wait)
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    began = clock.now
    with pytest.raises(Ended, match=str(EXIT_HANG)):
        watcher.watch()
    assert clock.now - began == pytest.approx(TIMEOUT_S + 0.5)  # the first look after it
    assert len(told) == 1 and f"no progress for {TIMEOUT_S:g} s" in told[0].what
    assert "in test_an_attached_or_inline_rank" in (tmp_path / "log").read_text(), "the stacks are in the log"


def test_ranks_that_do_not_join_are_waited_for_a_minute_altogether(monkeypatch, clock):
    nobody = SimpleNamespace(check=lambda keys: False)
    began = clock.now
    with pytest.raises(EnvironmentProblem, match=r"joined 0 of 3 ranks in 60 s; missing: 0, 1, 2"):
        rendezvous.gather(nobody, 3, rendezvous.JOIN_S)
    assert clock.now - began == pytest.approx(60, abs=1)


def test_a_rank_0_that_does_not_compose_is_waited_for_two_minutes(monkeypatch):
    waited = []
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "connect", lambda attached: None)
    monkeypatch.setattr(rendezvous, "get", lambda store, key, timeout_s: waited.append((key, timeout_s)))
    with pytest.raises(EnvironmentProblem, match="has waited 120 s for rank 0 to compose"):
        attach.follow([])
    assert waited == [("run", 120)]


def members(*hosts: str) -> list[Member]:
    """Ranks on these hosts."""
    return [Member(rank, host, rank + 1, "", {}, {}, "", "", True) for rank, host in enumerate(hosts)]


def test_a_leader_on_another_host_is_given_three_seconds_to_speak(monkeypatch, clock, tmp_path):
    peers = Peers(1, tmp_path, members("a", "b"), frozenset())
    began = clock.now
    assert peers.must_report(Failure(1, "lost", 6, 0, order=3))
    assert clock.now - began == pytest.approx(3.2, abs=0.1)  # a lower rank would have had 0.2 s to be the first


@pytest.mark.parametrize("waited_s", [0.0, 2.5, 9.0])
def test_ranks_that_hang_are_given_four_seconds_after_the_own_failure_to_tell_their_positions(
    clock, tmp_path, waited_s
):
    peers = Peers(0, tmp_path, members("a", "b"), frozenset({0}))
    own = Failure(0, "hangs", EXIT_HANG, clock.monotonic_ns())
    clock.sleep(waited_s)
    began = clock.now
    assert peers.positions(own)[1].activity == "does not answer"
    assert clock.now - began == pytest.approx(max(0.0, 4.0 - waited_s), abs=0.1)


def test_a_rank_that_mpirun_is_about_to_kill_does_not_wait_for_the_leader(clock, tmp_path):
    peers = Peers(1, tmp_path, members("a", "b"), frozenset())
    began = clock.now
    assert peers.must_report(Failure(1, "lost", 6, 0, order=3), lambda: True)
    assert clock.now - began < 0.5


def test_a_blocked_survivor_speaks_two_seconds_after_the_leader_is_gone(monkeypatch, clock, tmp_path):
    spoken, gone_at = [], clock.now + 4.0
    peers = Peers(1, tmp_path, members("a", "a"), frozenset({0, 1}))
    monkeypatch.setattr(Peers, "has_exited", lambda self, one: one == 0 and clock.now >= gone_at)
    monkeypatch.setattr(peers_module.threading, "Thread", lambda target, **_: SimpleNamespace(start=target))
    peers.watch_leader(heartbeat.HeartbeatFile(1, first_rank=1), lambda found: spoken.append(clock.now - gone_at))
    assert spoken == pytest.approx([2.0], abs=0.51)  # it looks every half second


def test_the_process_group_waits_longer_than_the_watchers(monkeypatch):
    import torch.distributed as dist

    asked = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: asked.update(more))
    monkeypatch.setattr(dist.distributed_c10d, "PrefixStore", lambda prefix, store: store)
    config = tiny_config(dp=2, timeout_s=TIMEOUT_S)
    rank._join(Job(config, tiny_plan(dp=2), Path()), 0, None)
    assert asked["timeout"].total_seconds() == 2 * TIMEOUT_S + 60
