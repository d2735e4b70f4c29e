"""The launcher over ssh: what it sends, how long it waits, and the exit code that it returns. No ssh, no ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.launch.host import interfaces
from parallelrun.launch.host.environment import for_other_hosts
from parallelrun.launch.over_ssh import hosts, ssh, ssh_agent
from parallelrun.launch.over_ssh.ssh_agent import GRACE_S, supervise
from tests.cli.launcher import read, survivors, wait_for
from tests.unit.launch.clock import Clock

TWO = hosts.place_ranks("2", "a:1,b:1")


class Child:
    """A rank, or the connection to an agent, that is no process. code: how it has ended; sent, killed: when."""

    def __init__(self, clock: Clock, code: int | None = None, host: hosts.HostRanks | None = None):
        self.code, self.host, self._clock = code, host, clock
        self.address: str | None = "10.0.0.9"
        self.relays = [SimpleNamespace(is_alive=lambda: self.code is None)]
        self.lines: list[str] = []
        self.sent: list[tuple[int, float]] = []
        self.killed: list[float] = []

    def poll(self) -> int | None:
        assert self._clock.now < 5000, "it is waited for without end"
        return self.code

    def send(self, line: str) -> None:
        self.lines.append(line)

    def send_signal(self, sig: int) -> None:
        self.sent.append((sig, self._clock.now))

    def kill(self) -> None:
        self.killed.append(self._clock.now)

    def unreachable(self) -> Problem:
        assert self.host is not None
        return Problem(f"{self.host.name} does not answer")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(ssh, "time", fake)
    monkeypatch.setattr(ssh_agent, "time", fake)
    return fake


@pytest.fixture
def started(monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """The words and variables of each rank that is started on this host."""
    ranks: list[Any] = []
    monkeypatch.setattr(ssh_agent, "Rank", lambda words, environ: ranks.append((words, environ)))
    return ranks


def run(children: list[Child], signals: list[int], grace_s: float = GRACE_S) -> int:
    return supervise(dict(enumerate(children)), signals, grace_s)  # type: ignore[arg-type]


def test_what_a_remote_shell_reads_is_quoted(monkeypatch, tmp_path):
    folder = tmp_path / "it's; a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/a b:$(c)")
    *words, host, command = ssh.remote_command("[fe80::1]", ["-F", "file"])
    assert words[0] == "ssh" and words[-2:] == ["-F", "file"] and host == "fe80::1"
    first, second = command.split(" && ")
    assert shlex.split(first) == ["cd", str(folder)]
    agent = [sys.executable, "-m", "parallelrun.launch.over_ssh.ssh_agent"]
    assert shlex.split(second) == ["exec", "env", "PYTHONPATH=/a b:$(c)", *agent]


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_rank_has_started_ends_with_it(monkeypatch, tmp_path, killed):
    program, child = tmp_path / "program", tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {child}\n{'wait' if killed else 'exit 3'}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    rank = ssh_agent.Rank([], dict(os.environ))
    pid = int(wait_for(lambda: read(child).strip(), "the child"))
    if killed:
        rank.kill()
    wait_for(lambda: rank.poll() is not None, "the end of the rank")
    assert rank.poll() == (-signal.SIGKILL if killed else 3)
    assert survivors([pid], 10.0) == []


def test_every_host_starts_its_own_ranks_of_one_world(clock, started, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    places = hosts.place_ranks("6", "a:3,b:2,localhost:1")
    agents = [Child(clock, None, place) for place in places[:2]]
    children = ssh.start(places, agents, ["steps=1"], [])  # type: ignore[arg-type]
    assert list(children) == [0, 3, 5]
    first, second = (json.loads(agent.lines[0]) for agent in agents)
    assert [(one["words"], one["first_rank"], one["num_ranks"]) for one in (first, second)] == [
        (["steps=1"], 0, 3),
        (["steps=1"], 3, 2),
    ]
    environ = first["environ"]
    assert (environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("6", "10.0.0.9")
    assert environ["OMP_NUM_THREADS"] == "2" and len(environ["PARALLELRUN_TOKEN"]) == 32
    assert second["environ"] == environ
    ((words, own),) = started
    assert words == ["steps=1"] and own["PARALLELRUN_TOKEN"] == environ["PARALLELRUN_TOKEN"]
    assert (own["RANK"], own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) == ("5", "0", "1")
    assert "starting ranks 0 to 2 on a, ranks 3 to 4 on b, rank 5 on localhost" in capsys.readouterr().err


def test_a_rank_on_another_host_gets_the_launcher_s_variables_but_for_those_of_one_host(started, monkeypatch):
    launcher = {"PATH": "/venv/bin:/bin", "OMP_NUM_THREADS": "2", "HOME": "/home/a", "CUDA_VISIBLE_DEVICES": "0"}
    shared = {"WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    own = for_other_hosts({**launcher, "SECRET": "x", "RANK": "7"})
    host = {"PATH": "/bin:/opt/bin", "OMP_NUM_THREADS": "9", "HOME": "/home/b", "RANK": "9", "SLURM_PROCID": "0"}
    monkeypatch.setattr(ssh_agent, "os", SimpleNamespace(environ=host, pathsep=os.pathsep))
    assert list(ssh_agent.start_ranks(["steps=1"], 4, 2, {**shared, **own})) == [4, 5]
    assert started[1][1] == {
        **shared,
        "PATH": "/venv/bin:/bin:/opt/bin",
        "OMP_NUM_THREADS": "2",
        "HOME": "/home/b",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("a:1,b:1", "10.0.0.9"),
        ("localhost:1,b:1", "from 10.0.0.9"),  # of this host, as packets to the other leave it
    ],
)
def test_rank_0_listens_on_an_address_that_the_others_reach(clock, started, monkeypatch, listed, expected):
    monkeypatch.setattr(interfaces, "address_towards", lambda address: f"from {address}")
    places = hosts.place_ranks("2", listed)
    agents = [Child(clock, None, place) for place in places if not place.is_here]
    ssh.start(places, agents, [], [])  # type: ignore[arg-type]
    assert json.loads(agents[-1].lines[0])["environ"]["MASTER_ADDR"] == expected


def test_a_host_that_does_not_answer_is_waited_for_a_minute(clock):
    agents: list[Any] = [Child(clock, None, place) for place in TWO]
    agents[1].address, began = None, clock.now
    with pytest.raises(EnvironmentProblem, match="b does not answer"):
        ssh.start(TWO, agents, [], [])
    assert clock.now - began == pytest.approx(60, abs=0.5)
    with pytest.raises(KeyboardInterrupt):
        ssh.start(TWO, agents, [], [signal.SIGINT])
    agents[1].code, began = 255, clock.now
    with pytest.raises(EnvironmentProblem, match="b does not answer"):
        ssh.start(TWO, agents, [], [])
    assert clock.now == began, "its ssh has ended"


@pytest.mark.parametrize(("status", "lost"), [(None, False), (75, False), (6, False), (255, True), (-9, True)])
def test_an_ssh_that_ends_by_itself_is_a_lost_connection(monkeypatch, capsys, status, lost):
    agent = ssh.Agent.__new__(ssh.Agent)
    agent.host = TWO[1]
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: status)
    monkeypatch.setattr(ssh.Agent, "__del__", lambda self: None, raising=False)
    assert agent.poll() == (6 if lost else status)
    assert ("the connection to host b (rank 1) was lost" in capsys.readouterr().err) == lost


@pytest.mark.parametrize("grace_s", [ssh.OTHERS_S, ssh_agent.GRACE_S])
@pytest.mark.parametrize(("status", "code"), [(5, 5), (6, 6), (-9, 6)])
def test_after_a_failure_the_others_have_some_seconds_and_the_run_has_its_code(clock, grace_s, status, code):
    children, began = [Child(clock), Child(clock, status)], clock.now
    assert run(children, [], grace_s) == code
    assert children[0].killed[0] - began == pytest.approx(grace_s, abs=0.5) and not children[1].killed


def test_ctrl_c_reaches_every_child_at_once_and_ends_them_after_five_seconds(clock):
    children, began = [Child(clock), Child(clock)], clock.now
    assert run(children, [signal.SIGINT]) == 130
    for child in children:
        ((number, when),) = child.sent
        assert number == signal.SIGINT and when - began < 0.5
        assert child.killed[0] - began == pytest.approx(5, abs=0.5)


def test_a_second_signal_ends_all_at_once(clock):
    children, began = [Child(clock), Child(clock)], clock.now
    assert run(children, [signal.SIGTERM, signal.SIGTERM]) == 143
    assert all(child.killed[0] - began < 0.5 for child in children)


@pytest.mark.parametrize(
    ("codes", "signals", "expected"),
    [
        ({1: 0, 0: 0}, [], 0),
        ({1: 6, 0: 5}, [], 5),  # rank 0 knows the cause
        ({1: 3, 0: 0}, [], 3),
        ({2: -9, 1: 0}, [], 6),
        ({2: 3, 1: 5}, [], 3),
        ({1: 75, 0: 75}, [signal.SIGTERM], 75),
        ({1: 6, 0: 75}, [signal.SIGTERM], 6),
        ({1: 130, 0: 130}, [signal.SIGINT], 130),
        ({1: 6, 0: 6}, [signal.SIGTERM, signal.SIGTERM], 143),
    ],
)
def test_one_exit_code_tells_how_the_run_ended(clock, codes, signals, expected):
    children: Any = {rank: Child(clock, code) for rank, code in codes.items()}
    assert supervise(children, signals) == expected and not children
