"""The launcher over ssh: what it sends, how long it waits, and the exit code that it returns. No ssh, no ranks."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from types import SimpleNamespace

import pytest

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.launch.host import os_process
from parallelrun.launch.host.environment import for_other_hosts
from parallelrun.launch.over_ssh import hosts, ssh, ssh_agent, ssh_connection
from parallelrun.launch.over_ssh.ssh import SshRun
from tests.unit.launch.clock import Clock

TWO = hosts.place_ranks("2", "a:1,b:1")
SSH = None


class Agent:
    """A connection to an agent that is no process. status: how its ssh has ended; sent: lines, with their time."""

    LOST = 255

    def __init__(self, host: hosts.HostRanks, clock: Clock):
        self.host, self.address, self._clock = host, "10.0.0.9", clock
        self.status: int | None = None
        self.sent: list[tuple[str, float]] = []
        self.hung_up: list[float] = []
        self.killed: list[float] = []
        self.is_stopped = self.is_closed = False
        self.process = SimpleNamespace(poll=lambda: self.status, kill=self._kill)

    def send(self, line: str) -> None:
        self.sent.append((line, self._clock.now))

    def hang_up(self) -> None:
        self.hung_up.append(self._clock.now)
        self.is_closed = True
        if not self.is_stopped:
            self.status = 6

    def _kill(self) -> None:
        self.killed.append(self._clock.now)
        self.status = -9

    def unreachable(self) -> Problem:
        return Problem(f"{self.host.name} does not answer")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(ssh, "time", fake)
    return fake


@pytest.fixture
def agents(monkeypatch, clock) -> dict[str, Agent]:
    """The connections that an SshRun makes, by host."""
    made: dict[str, Agent] = {}

    def connect(host: hosts.HostRanks, _: object) -> Agent:
        return made.setdefault(host.name, Agent(host, clock))

    connect.LOST = Agent.LOST  # type: ignore[attr-defined]
    monkeypatch.setattr(ssh, "SshConnection", connect)
    return made


def test_what_a_remote_shell_reads_is_quoted(monkeypatch, tmp_path):
    folder = tmp_path / "it's; a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "/a b:$(c)")
    *words, host, command = ssh_connection.remote_command("[fe80::1]", ["-F", "file"])
    assert words[0] == "ssh" and words[-2:] == ["-F", "file"] and host == "fe80::1"
    first, second = command.split(" && ")
    assert shlex.split(first) == ["cd", str(folder)]
    agent = [sys.executable, "-m", "parallelrun.launch.over_ssh.ssh_agent"]
    assert shlex.split(second) == ["exec", "env", "PYTHONPATH=/a b:$(c)", *agent]


def test_every_host_starts_its_own_ranks_of_one_world(agents, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    SshRun(hosts.place_ranks("5", "a:3,b:2"), SSH, []).start(["steps=1"])
    first, second = (json.loads(agent.sent[0][0]) for agent in agents.values())
    assert [(one["words"], one["first_rank"], one["num_ranks"]) for one in (first, second)] == [
        (["steps=1"], 0, 3),
        (["steps=1"], 3, 2),
    ]
    environ = first["environ"]
    assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"], environ["MASTER_ADDR"]) == ("5", "3", "10.0.0.9")
    assert environ["OMP_NUM_THREADS"] == "2" and len(environ["PARALLELRUN_TOKEN"]) == 32
    assert second["environ"] == {**environ, "LOCAL_WORLD_SIZE": "2"}


def test_a_rank_on_another_host_gets_the_launcher_s_variables_but_for_those_of_one_host():
    launcher = {"PATH": "/venv/bin:/bin", "OMP_NUM_THREADS": "2", "HOME": "/home/a", "CUDA_VISIBLE_DEVICES": "0"}
    shared = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    own = for_other_hosts({**launcher, "SECRET": "x", "RANK": "7"})
    order = ssh_agent.Order(["steps=1"], 4, 2, {**shared, **own})
    host = {"PATH": "/bin:/opt/bin", "HOME": "/home/b", "RANK": "9", "SLURM_PROCID": "0"}
    assert ssh_agent.variables(order, 5, host) == {
        **shared,
        "PATH": "/venv/bin:/bin:/opt/bin",
        "OMP_NUM_THREADS": "2",
        "HOME": "/home/b",
        "RANK": "5",
        "LOCAL_RANK": "1",
    }


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["10.0.0.2", "10.0.0.3"], "10.0.0.2"),
        (["", "127.0.0.1"], "127.0.0.1"),  # of this host, as packets to the other leave it
    ],
)
def test_rank_0_listens_on_an_address_that_the_others_reach(addresses, expected):
    assert ssh._address_of_rank_0(addresses) == expected


def test_a_host_that_does_not_answer_is_waited_for_a_minute(agents, clock):
    attempt = SshRun(TWO, SSH, [])
    agents["b"].address = None
    began = clock.now
    with pytest.raises(EnvironmentProblem, match="b does not answer"):
        attempt.start([])
    assert clock.now - began == pytest.approx(60, abs=0.5)
    with pytest.raises(KeyboardInterrupt):
        signals = [signal.SIGINT]
        SshRun(TWO, SSH, signals).start([])


@pytest.mark.parametrize(("status", "code"), [(5, 5), (255, 6), (-9, 6)])
def test_after_a_host_has_failed_the_others_have_fifteen_seconds_and_the_run_has_its_code(
    agents, clock, capsys, status, code
):
    attempt = SshRun(TWO, SSH, [])
    began, agents["b"].status = clock.now, status
    assert attempt.watch() == code
    assert agents["a"].hung_up[0] - began == pytest.approx(15, abs=0.5)
    assert ("the connection to host b (rank 1) was lost" in capsys.readouterr().err) == (status != 5)


def test_an_agent_that_does_not_end_is_killed_after_five_more_seconds(agents, clock):
    attempt = SshRun(TWO, SSH, [])
    began, agents["b"].status, agents["a"].is_stopped = clock.now, 6, True
    assert attempt.watch() == 6
    assert agents["a"].killed[0] - began == pytest.approx(20, abs=0.5)


def test_ctrl_c_reaches_every_host_at_once_and_ends_them_after_five_seconds(agents, clock):
    attempt, began = SshRun(TWO, SSH, [signal.SIGINT]), clock.now
    assert attempt.watch() == 130
    for agent in agents.values():
        ((line, when),) = agent.sent
        assert line == "SIGINT" and when - began < 0.5
        assert agent.hung_up[0] - began == pytest.approx(5, abs=0.5)


def test_a_second_signal_ends_all_hosts_at_once(agents, clock):
    attempt, began = SshRun(TWO, SSH, [signal.SIGTERM, signal.SIGTERM]), clock.now
    assert attempt.watch() == 143
    assert all(agent.hung_up[0] - began < 0.5 for agent in agents.values())


@pytest.mark.parametrize(
    ("codes", "signals", "expected"),
    [
        ({"b": 0, "a": 0}, [], 0),
        ({"b": 6, "a": 5}, [], 5),  # rank 0, on the first host, knows the cause
        ({"b": 3, "a": 0}, [], 3),
        ({"b": 75, "a": 75}, [signal.SIGTERM], 75),
        ({"b": 6, "a": 75}, [signal.SIGTERM], 6),
        ({"b": 130, "a": 130}, [signal.SIGINT], 130),
        ({"b": 6, "a": 6}, [signal.SIGTERM, signal.SIGTERM], 143),
    ],
)
def test_one_exit_code_tells_how_the_run_ended_on_all_hosts(agents, codes, signals, expected):
    attempt = SshRun(TWO, SSH, signals)
    attempt._codes = codes
    assert attempt._exit_code() == expected


def test_an_agent_kills_the_other_ranks_ten_seconds_after_one_has_failed(monkeypatch, clock):
    codes: dict[int, int | None] = {11: None, 12: 5}
    killed: list[tuple[int, int, float]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number, clock.now))
        codes[pid] = -number

    monkeypatch.setattr(ssh_agent, "time", clock)
    monkeypatch.setattr(ssh_agent, "_start", lambda words, environ: 11 + int(environ["RANK"]))
    monkeypatch.setattr(os_process, "reap", codes.get)
    monkeypatch.setattr(os_process, "kill", kill)
    began = clock.now
    assert ssh_agent.Ranks(ssh_agent.Order([], 0, 2, {})).wait() == 5
    ((pid, number, when),) = killed
    assert (pid, number) == (11, signal.SIGKILL)
    assert when - began == pytest.approx(10, abs=0.5)
