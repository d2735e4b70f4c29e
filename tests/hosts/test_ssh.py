"""Our launcher over ssh: whatever is killed, the run ends in time, blames the right rank and host, and leaves nothing.

Each test has hosts of its own, because it may kill what is on them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelrun.checkpoint.find import latest
from parallelrun.launch.failures.guard import RANKS_GONE
from tests.cli.launcher import read, survivors, wait_for
from tests.cli.test_launch_supervisor import listening_addresses
from tests.hosts.jobs import Job, environ
from tests.hosts.network import Network, network_of
from tests.hosts.test_launchers import TINY
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
LONG = pytest.mark.skipif(not FULL, reason="with --matrix=full")
STEPS, AT_STEP, ENDLESS = 60, 8, 1_000_000
PROGRAM = ("-m", "parallelrun", *(word for word in TINY if not word.startswith("steps=")),
           "strategy.data.kind=zero1", "checkpoint.keep=3", "eval.every=0")  # fmt: skip
BOTH = "worker-1:2,worker-2:2"


@pytest.fixture
def own() -> Iterator[Network]:
    """Two hosts."""
    with network_of("worker-1", "worker-2") as network:
        yield network


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """The run that never failed, on one host."""
    folder = tmp_path_factory.mktemp("one host")
    command = [sys.executable, *PROGRAM, f"steps={STEPS}", "checkpoint.every=4", "backend=gloo"]
    subprocess.run(command, cwd=folder, env=environ(), check=True, timeout=400, capture_output=True)
    return next(folder.glob("runs/*/*/config.yaml")).parent


def losses(run: Path) -> list[float]:
    """The loss of each step. No step is there twice."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def train(network: Network, folder: Path, hosts: str, steps: int = ENDLESS) -> Job:
    """A launcher on the first host, once its ranks have passed some steps and have saved."""
    words = (f"steps={steps}", "checkpoint.every=4", "-H", hosts)
    ssh = ("--ssh-config", str(network.serve_ssh()))
    job = Job(folder, [
        network.popen("worker-1", sys.executable, *PROGRAM, *words, *ssh, output=folder / "output", env=environ())
    ])  # fmt: skip
    file = job.run / "metrics.jsonl"
    wait_for(lambda: len(read(file).splitlines()) >= AT_STEP, f"a step\n{job.output}", 120.0)
    wait_for(lambda: latest(job.run), "a checkpoint")  # it is written beside training
    return job


def agent(network: Network, name: str) -> int:
    """The agent of a host."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in network.processes(name)}
    return next(pid for pid, words in lines.items() if b"parallelrun.launch.over_ssh.ssh_agent" in words)


def ranks(network: Network, name: str) -> list[int]:
    """The ranks of a host, in their order: the children of its agent."""
    return sorted(pid for pid in network.processes(name) if parent(pid) == agent(network, name))


def parent(pid: int) -> int:
    return int(read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])


def nothing_left(network: Network) -> None:
    """No launcher, ssh, agent, rank or guard lives on any host, or ends within seconds."""
    pids = [pid for name in network.names for pid in network.processes(name) if pid != network.keeper(name)]
    left = survivors([pid for pid in pids if "sshd" not in read(Path(f"/proc/{pid}/cmdline"))], 15.0)
    assert left == [], [read(Path(f"/proc/{pid}/cmdline")) for pid in left]


def check_failed(job: Job, network: Network, blamed: set[int], host: str) -> None:
    """The run has ended with code 6 because of one of these ranks of a host."""
    assert job.wait() == [6], job.output
    status = job.status
    assert (status["state"], status["exit_code"]) == ("failed", 6), job.output
    assert status["failed_rank"] in blamed, job.output
    assert f"error: rank {status['failed_rank']} (" in job.output and f", {host}, pid " in job.output, job.output
    nothing_left(network)


def test_uneven_hosts_have_the_ranks_in_their_order(own, tmp_path, expected):
    """A folder's name reaches the remote shell: it must not be read by it."""
    folder = tmp_path / "it's; touch pwned $(touch pwned)"
    folder.mkdir()
    job = train(own, folder, "worker-2:1,worker-1:3", STEPS)
    rows = job.status["ranks"]
    assert [(row["rank"], row["host"]) for row in rows] == [(0, "worker-2"), *((n, "worker-1") for n in (1, 2, 3))]
    assert listening_addresses(ranks(own, "worker-2")) == {"02004D0A"}, "10.77.0.2, as /proc/net/tcp writes it"
    assert job.wait() == [0], job.output
    assert "starting rank 0 on worker-2, ranks 1 to 3 on worker-1" in job.output
    assert re.search(rf"^\[worker-2\] step {STEPS}/{STEPS} .*tokens/s$", job.output, re.MULTILINE)
    assert losses(job.run) == losses(expected)
    assert not list(tmp_path.rglob("pwned"))
    nothing_left(own)


def test_every_host_that_cannot_be_reached_or_has_no_such_python_is_named(own, tmp_path):
    words = ["-H", "worker-2:1,nosuch.invalid:1", "--ssh-config", str(own.serve_ssh()), "steps=1"]
    program = "import sys; sys.executable = '/no such/python'; from parallelrun.cli import main as program"
    command = [sys.executable, "-c", f"{program}; sys.exit(program.main({words}))"]
    job = Job(tmp_path, [own.popen("worker-1", *command, output=tmp_path / "output", env=environ())])
    assert job.wait() == [3], job.output
    assert re.search("ssh cannot start parallelrun on worker-2: .*/no such/python", job.output), job.output
    assert "ssh cannot start parallelrun on nosuch.invalid: ssh: Could not resolve hostname" in job.output
    assert f"ssh -F {own.folder}/ssh_config nosuch.invalid" in job.output and "parallelrun doctor" in job.output


@pytest.mark.parametrize("rank", [0, 1, pytest.param(2, marks=LONG), pytest.param(3, marks=LONG)])
def test_a_killed_rank_is_blamed_with_its_host(own, tmp_path, rank):
    """Some wait in gloo for a rank that waits in shared memory for another: each must pass the loss on at once."""
    job = train(own, tmp_path, BOTH)
    host = own.names[rank // 2]
    os.kill(ranks(own, host)[rank % 2], signal.SIGKILL)
    check_failed(job, own, {rank}, host)


@pytest.mark.parametrize("name", ["worker-2", pytest.param("worker-1", marks=LONG)])
def test_the_ranks_of_a_killed_agent_end_with_it_and_are_blamed(own, tmp_path, name):
    job = train(own, tmp_path, BOTH)
    os.kill(agent(own, name), signal.SIGKILL)
    number = own.names.index(name)
    check_failed(job, own, {2 * number, 2 * number + 1}, name)
    assert f"error: the connection to host {name} (ranks {2 * number} to {2 * number + 1}) was lost" in job.output


def test_a_killed_launcher_leaves_nothing_but_a_final_status(own, tmp_path):
    job = train(own, tmp_path, BOTH)
    job.processes[0].kill()
    wait_for(lambda: job.status["state"] != "running", f"a final status\n{job.output}", 60.0)
    assert (job.status["state"], job.status["error"]) == ("failed", RANKS_GONE)
    nothing_left(own)


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGINT, 130, "interrupted"), pytest.param(signal.SIGTERM, 75, "preempted", marks=LONG)],
)
def test_a_signal_ends_the_ranks_on_all_hosts(own, tmp_path, number, code, state):
    job = train(own, tmp_path, BOTH)
    job.processes[0].send_signal(number)
    assert job.wait() == [code], job.output
    assert job.status["state"] == state
    nothing_left(own)


def test_a_host_that_is_cut_off_is_named_and_the_run_ends(own, tmp_path):
    job = train(own, tmp_path, BOTH)
    own.check("worker-2", "ip", "link", "set", "eth0", "down")
    assert job.wait() == [6], job.output
    lost = "the connection to host worker-2 (ranks 2 to 3) was lost"
    assert f"error: {lost}" in job.output
    assert (job.status["state"], job.status["failed_rank"]) == ("failed", 2), job.output
    assert job.status["error"] == f"{lost}: it does not answer"
    nothing_left(own)
