"""Timeouts and grace periods of the launcher, with a fake clock: nothing happens before its time, and nothing later.

No process and no waiting: what a slow machine cannot shorten or lengthen. The times are written out here, not read from
the code, because a wrong constant is what these tests look for.
"""

from __future__ import annotations

import io
import queue
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallelrun.cli import host_connection, host_launcher, host_ranks, hosts
from parallelrun.errors import EXIT_HANG, EnvironmentProblem, Problem
from parallelrun.launch import (
    attach,
    directory,
    failure,
    failure_detection,
    hang,
    heartbeat,
    processes,
    rank,
    rendezvous,
    stores,
    supervisor,
)
from parallelrun.launch import peers as peers_module
from parallelrun.launch.failure import Failure
from parallelrun.launch.peers import Peers
from parallelrun.launch.rank import Job
from parallelrun.launch.rendezvous import Member
from parallelrun.launch.supervisor import Supervisor
from tests.plans import tiny_config, tiny_plan

TIMEOUT_S = 7.0


class Clock:
    """Stands in for the `time` module of the code under test."""

    def __init__(self):
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


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
    monkeypatch.setattr(processes, "kill", lambda pid, number: found.sent.append((pid, number, clock.now)))
    monkeypatch.setattr(processes, "is_stopped", lambda pid: False)
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


def test_after_a_failure_the_others_have_one_second_to_tell_theirs(ranks, clock):
    began = clock.now
    ranks._fail(1, 3, clock.monotonic_ns())
    pass_time(ranks, clock, 0.75)
    assert not ranks.sent
    pass_time(ranks, clock, 0.25)
    assert killed_after(ranks, began) == pytest.approx(1.0)


def test_a_second_failure_gives_no_more_time(ranks, clock):
    began = clock.now
    ranks._fail(1, 3, clock.monotonic_ns())
    pass_time(ranks, clock, 0.75)
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
    monkeypatch.setattr("parallelrun.sequences.num_bytes", lambda directory: min(5.0, clock.now - began))
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


def test_an_attached_or_inline_rank_notices_its_hang_at_the_timeout(monkeypatch, clock):
    own, told = heartbeat.HeartbeatFile(1), []

    def wait(seconds: float) -> bool:
        clock.now += seconds
        return False

    def leave(code: int) -> None:
        raise Ended(code)

    watcher = failure_detection.Watchdog(own, 0, TIMEOUT_S, io.StringIO(), told.append, None)
    watcher.done = SimpleNamespace(wait=wait)
    monkeypatch.setattr(failure_detection.os, "_exit", leave)
    began = clock.now
    with pytest.raises(Ended, match=str(EXIT_HANG)):
        watcher.watch()
    assert clock.now - began == pytest.approx(TIMEOUT_S + 0.5)  # the first look after it
    assert len(told) == 1 and f"no progress for {TIMEOUT_S:g} s" in told[0].what


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


# -- several hosts


class Connections:
    """Connections to agents that are no processes. messages: what comes from them; sent: signals, with their time."""

    def __init__(self, clock: Clock):
        self.by_name = {name: SimpleNamespace(name=name, why="") for name in "ab"}
        self.signals: list[int] = []
        self.messages: list[tuple[str, str, object]] = []
        self.sent: list[tuple[str, int, float]] = []
        self.opened: list[str] = []
        self._clock = clock
        self.silent: set[str] = set()

    def next_message(self):
        if not self.messages:
            self._clock.sleep(0.1)
            return None
        name, what, content = self.messages.pop(0)
        return self.by_name[name], what, content

    def send_signal(self, names, number):
        for name in names:
            self.sent.append((name, number, self._clock.now))
            if number == signal.SIGKILL and name not in self.silent:
                self.messages.append((name, "ended", 6))

    def drop(self, name):
        del self.by_name[name]

    def open(self, hosts, again=False):
        self.opened += [one.name for one in hosts if again]
        self.by_name |= {one.name: SimpleNamespace(name=one.name, why="") for one in hosts}


@pytest.fixture
def connections(monkeypatch, clock) -> Connections:
    monkeypatch.setattr(host_launcher, "time", clock)
    return Connections(clock)


def started(connections: Connections, judges: bool = False) -> host_launcher.HostLauncher:
    """A launcher of two hosts whose ranks run; the loop moves the clock."""
    return host_launcher.HostLauncher(hosts.read("2", "a:1,b:1"), [], connections, judges=judges)


def failed(rank: int, status: int) -> dict[str, object]:
    return {"rank": rank, "status": status, "memory": False}


def test_after_a_host_has_failed_the_others_have_fifteen_seconds_and_the_run_has_its_code(connections, clock):
    began = clock.now
    connections.messages += [("b", "exit", failed(1, 5)), ("b", "ended", 5)]
    assert started(connections).watch() == 5
    ((name, number, when),) = connections.sent
    assert (name, number) == ("a", signal.SIGKILL) and when - began == pytest.approx(15, abs=0.5)


@pytest.mark.parametrize(("status", "grace_s"), [(-9, 1), (6, 1), (EXIT_HANG, 15)])
def test_who_judges_ends_the_others_after_a_second_unless_they_explain_a_hang(connections, clock, status, grace_s):
    began = clock.now
    connections.messages += [("b", "exit", failed(1, status))]
    launcher = started(connections, judges=True)
    assert launcher.watch() == 6
    assert connections.sent[0][2] - began == pytest.approx(grace_s, abs=0.5)
    assert [(one.rank, one.status, one.host) for one in launcher.exits] == [(1, status, "b")]


def test_a_lost_host_is_connected_to_again_while_the_others_are_ended_at_once(connections, clock):
    began = clock.now
    connections.messages += [("b", "closed", None)]
    launcher = started(connections, judges=True)
    assert launcher.watch() == 6
    assert connections.opened == ["b"] and [one.name for one in launcher.lost] == ["b"]
    assert connections.sent[0][0] == "a" and connections.sent[0][2] - began < 0.5


def test_an_agent_that_does_not_end_its_ranks_is_dropped_after_five_seconds(connections, clock):
    began = clock.now
    connections.messages += [("b", "exit", failed(1, 6)), ("b", "ended", 6)]
    connections.silent.add("a")
    assert started(connections, judges=True).watch() == 6
    assert "a" not in connections.by_name and clock.now - began == pytest.approx(6, abs=0.5)


def test_an_agent_that_is_silent_while_its_ranks_run_is_killed_after_half_a_minute(monkeypatch, clock):
    """Others are heard, or have no ranks yet; time in which the launcher stood still does not count."""
    monkeypatch.setattr(host_connection, "time", clock)
    found = host_connection.Connections(hosts.SshOptions(), [])
    killed = []

    def agent(name: str, silence: int | None) -> SimpleNamespace:
        return SimpleNamespace(name=name, silence=silence, why="", kill=lambda: killed.append((name, clock.now)))

    silent, heard, idle = agent("silent", 0), agent("heard", 0), agent("idle", None)
    found.by_name |= {one.name: one for one in (silent, heard, idle)}
    began = clock.now
    while clock.now - began < 100:
        found.messages.put((heard, "alive", None))
        found.next_message()
        clock.sleep(0.5)
        if clock.now - began == 10:
            clock.sleep(20)
    ((name, when),) = killed
    assert (name, silent.why, idle.silence) == ("silent", "its agent does not answer", None)
    assert when - began == pytest.approx(30 + 20, abs=1)


def test_ctrl_c_reaches_every_host_at_once_and_ends_them_after_five_seconds(connections, clock):
    connections.signals.append(signal.SIGINT)
    began = clock.now
    assert started(connections).watch() == 130
    assert [one[:2] for one in connections.sent[:2]] == [("a", signal.SIGINT), ("b", signal.SIGINT)]
    assert connections.sent[1][2] - began < 0.5
    assert connections.sent[2][2] - began == pytest.approx(5, abs=0.5)


def test_a_second_signal_ends_all_hosts_at_once(connections, clock):
    connections.signals += [signal.SIGTERM, signal.SIGTERM]
    began = clock.now
    assert started(connections).watch() == 143
    assert connections.sent[-1][1] == signal.SIGKILL and connections.sent[-1][2] - began < 0.5


def test_a_host_that_does_not_answer_is_waited_for_a_minute(monkeypatch, clock):
    monkeypatch.setattr(host_connection, "time", clock)
    found = host_connection.Connections(hosts.SshOptions(), [])
    waiting = SimpleNamespace(hello=None, process=SimpleNamespace(poll=lambda: None))
    waiting.unreachable = lambda: Problem("no answer")
    found.by_name["a"] = waiting
    began = clock.now
    with pytest.raises(EnvironmentProblem, match="no answer"):
        found.must_greet(["a"])
    assert clock.now - began == pytest.approx(60, abs=0.5)


@pytest.mark.parametrize(("recorded", "seconds"), [(False, 10), (True, failure.GRACE_S)])
def test_an_agent_ends_the_other_ranks_ten_seconds_after_one_has_failed_or_soon_after_a_rank_has_recorded_it(
    monkeypatch, clock, tmp_path, recorded, seconds
):
    monkeypatch.setattr(host_ranks, "time", clock)
    killed = []
    monkeypatch.setattr(processes, "kill", lambda pid, number: killed.append((pid, number, clock.now)))
    found = host_ranks.Ranks.__new__(host_ranks.Ranks)
    found.notes = host_ranks.HostNotes()
    found.notes.set_run(tmp_path)
    if recorded:
        directory.Status(tmp_path).ended(6, "rank 1 died", 1)
    found._pids, found._codes, found._ended_by_us, found._deadline = {0: 11}, {1: 6}, False, float("inf")
    monkeypatch.setattr(found, "_reap", lambda: found._pids.clear() if killed else None)

    def get(timeout: float) -> str:
        clock.now += timeout
        raise queue.Empty

    began = clock.now
    assert found.watch(SimpleNamespace(get=get)) == 6
    ((pid, number, when),) = killed
    assert (pid, number) == (11, signal.SIGKILL)
    assert when - began == pytest.approx(seconds, abs=0.5)


def test_an_earlier_connection_to_a_host_that_was_connected_to_again_says_nothing_any_more(connections):
    launcher, earlier = started(connections, judges=True), connections.by_name["b"]
    connections.open([SimpleNamespace(name="b")])
    launcher._take((earlier, "closed", None))
    assert not launcher.lost and "b" in connections.by_name
