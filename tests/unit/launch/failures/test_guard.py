"""What is left of a run whose launcher is gone: a final status, unless somebody who knows more has written one."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from parallelrun.base.records import write_json
from parallelrun.launch.failures import guard
from parallelrun.launch.failures.peers import Peers
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.os_process import is_stopped, start_time
from parallelrun.launch.store.live import path_of
from parallelrun.launch.store.rendezvous import Member
from parallelrun.report.records import attempts
from parallelrun.report.records.attempts import Attempt

NO_PROCESS = 2**22 + 1


def a_run(folder: Path, *ranks: dict[str, object]) -> Path:
    (folder / "logs").mkdir()
    Status(folder).running(7, ranks=[{"rank": number, **row} for number, row in enumerate(ranks)])
    return folder


def state(folder: Path) -> dict[str, object]:
    return json.loads((folder / "status.json").read_text())


def here(pid: int) -> dict[str, object]:
    return {"pid": pid, "host": socket.gethostname()}


def test_a_process_that_ends_inside_the_block_lets_its_guard_act_and_no_other(tmp_path):
    for name in ("killed", "left"):
        pid = os.fork()
        if not pid:
            with guard.guarded((tmp_path / name).touch):
                if name == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        os.waitpid(pid, 0)
    deadline = time.monotonic() + 20
    while not (tmp_path / "killed").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name for path in tmp_path.iterdir()] == ["killed"]


def test_a_guard_holds_nothing_that_its_process_had_open(tmp_path):
    """Else a lock or a connection of the process would outlive it for as long as the guard acts."""
    reads, writes = os.pipe()
    go = tmp_path / "go"

    def act() -> None:
        while not go.exists():
            time.sleep(0.01)

    pid = os.fork()
    if not pid:
        with guard.guarded(act):
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writes)
    os.waitpid(pid, 0)
    try:
        assert select.select([reads], [], [], 10.0)[0] and os.read(reads, 1) == b""
    finally:
        go.touch()
        os.close(reads)


def test_a_run_without_anybody_has_failed_at_its_last_step(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "PATIENCE_S", 0.01)
    guard.conclude_abandoned(a_run(tmp_path, here(NO_PROCESS)), guard.LAUNCHER_GONE)
    found = state(tmp_path)
    assert (found["state"], found["exit_code"], found["step"]) == ("failed", 6, 7)
    assert found["error"] == guard.LAUNCHER_GONE


def test_where_nobody_else_can_write_it_does_not_wait(tmp_path, monkeypatch):
    """A scheduler that sees the ranks' end ends this process, too."""
    began = time.monotonic()
    monkeypatch.setattr(guard, "PATIENCE_S", 30.0)
    guard.conclude_abandoned(a_run(tmp_path, here(NO_PROCESS), here(NO_PROCESS)), guard.RANKS_GONE)
    assert state(tmp_path)["error"] == guard.RANKS_GONE and time.monotonic() - began < 15


def test_a_status_that_tells_more_is_left_alone(tmp_path, monkeypatch):
    Status(a_run(tmp_path)).ended(7, "rank 1 hangs", 1)
    monkeypatch.setattr(guard, "PATIENCE_S", 0.2)
    guard.conclude_abandoned(tmp_path, guard.LAUNCHER_GONE)
    assert state(tmp_path)["error"] == "rank 1 hangs"


@pytest.mark.parametrize("who", ["a rank here", "a rank of another host", "the next attempt"])
def test_whoever_survives_goes_first(tmp_path, monkeypatch, who):
    """Without the wait the status would be written 0.05 s after the launcher's end."""
    monkeypatch.setattr(guard, "_TICK_S", 0.01)
    monkeypatch.setattr(guard, "period_s", lambda world: 0.1)
    rows = [here(NO_PROCESS), here(os.getpid()) if who == "a rank here" else {"pid": 1, "host": "elsewhere"}]
    run, done = a_run(tmp_path, *rows), threading.Event()

    def live() -> None:
        for number in range(30):
            if who == "a rank of another host":
                write_json(path_of(run, 1), {"step": number})
            if who == "the next attempt" and number == 2:
                attempts.write(run, [Attempt(1, 2, {}), Attempt(2, 2, {})])
            time.sleep(0.02)
        if who != "the next attempt":
            Status(run).ended(5, "a better one")
        done.set()

    thread = threading.Thread(target=live)
    thread.start()
    monkeypatch.setattr(guard, "PATIENCE_S", 0.2)
    guard.conclude_abandoned(run, guard.RANKS_GONE)
    thread.join()
    assert state(run)["error"] == (None if who == "the next attempt" else "a better one")


def test_ranks_that_are_stopped_or_silent_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "period_s", lambda world: 0.02)
    monkeypatch.setattr(guard, "_TICK_S", 0.01)
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stopped.send_signal(signal.SIGSTOP)
    too_late = threading.Timer(10, stopped.kill)
    too_late.start()
    try:
        run = a_run(tmp_path, here(stopped.pid), {"pid": 1, "host": "elsewhere"})
        write_json(path_of(run, 1), {"step": 3})
        monkeypatch.setattr(guard, "PATIENCE_S", 0.1)
        guard.conclude_abandoned(run, guard.RANKS_GONE)
        assert stopped.poll() is None, "waited for until it was killed"
    finally:
        too_late.cancel()
        stopped.kill()
        stopped.communicate()
    assert state(run)["error"] == guard.RANKS_GONE


@pytest.mark.parametrize("who", ["the rank that has it", "another rank"])
def test_a_guard_kills_the_stopped_ranks_of_its_host_once_the_run_is_recorded(tmp_path, monkeypatch, who):
    """Its own rank, the only one of the host, may be stopped; or be gone while another one is."""
    monkeypatch.setattr(guard, "_LOOK_S", 0.05)
    run = a_run(tmp_path)
    stopped = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ranks = os.fork()
    if not ranks:
        pids = (os.getpid(), stopped.pid)
        members = [Member(n, "a", pid, start_time(pid), {}, {}, "", "", True) for n, pid in enumerate(pids)]
        with guard.of_stopped_ranks(Peers(0, run, members, frozenset({0, 1}))):
            os.kill(os.getpid() if who == "the rank that has it" else stopped.pid, signal.SIGSTOP)
            os._exit(0)
    culprit = ranks if who == "the rank that has it" else stopped.pid
    too_late = threading.Timer(30, os.kill, (culprit, signal.SIGCONT))
    try:
        while not is_stopped(culprit):
            time.sleep(0.01)
        time.sleep(0.3)
        assert is_stopped(culprit), "killed before the end was recorded"
        Status(run).ended(7, "rank 1 hangs", 1)
        too_late.start()
        status = os.waitstatus_to_exitcode(os.waitpid(ranks, 0)[1])
        if who == "another rank":
            status = stopped.wait()
        assert status == -signal.SIGKILL
    finally:
        too_late.cancel()
        stopped.kill()
        stopped.communicate()


def test_a_guard_waits_while_a_rank_lives_and_may_still_tell_why(tmp_path, monkeypatch):
    """A rank that the launcher's death has not ended yet, and one that goes before the guard's patience begins."""
    pid = os.fork()
    if not pid:
        time.sleep(1.0)
        os._exit(0)
    reaper = threading.Thread(target=os.waitpid, args=(pid, 0))
    reaper.start()
    run = a_run(tmp_path, here(pid), {"pid": 1, "host": "another"})
    monkeypatch.setattr(guard, "PATIENCE_S", 0.3)
    guard.conclude_abandoned(run, guard.LAUNCHER_GONE)
    alive = reaper.is_alive()
    reaper.join()
    assert not alive and state(run)["state"] == "failed"
