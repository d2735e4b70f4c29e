"""Our launcher over ssh: whatever is killed, the run ends in time, blames the right rank and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from parallelrun.checkpoint.find import latest
from parallelrun.launch.failures.guard import RANKS_GONE
from tests.cli.launcher import read, survivors, wait_for
from tests.hosts.jobs import Job, agent, environ, ranks
from tests.hosts.network import Network
from tests.hosts.test_launchers import TINY
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
LONG = pytest.mark.skipif(not FULL, reason="with --matrix=full")
AT_STEP, ENDLESS = 8, 1_000_000
PROGRAM = ("-m", "parallelrun", *(word for word in TINY if not word.startswith("steps=")),
           "strategy.data.kind=zero1", "checkpoint.keep=3", "eval.every=0")  # fmt: skip
BOTH = "worker-1:2,worker-2:2"


def train(network: Network, ssh_config: Path, folder: Path, hosts: str) -> Job:
    """A launcher on the first host, once its ranks have passed some steps and have saved."""
    words = (f"steps={ENDLESS}", "checkpoint.every=4", "-H", hosts)
    ssh = ("--ssh-config", str(ssh_config))
    job = Job(folder, [
        network.popen("worker-1", sys.executable, *PROGRAM, *words, *ssh, output=folder / "output", env=environ())
    ])  # fmt: skip
    file = job.run / "metrics.jsonl"
    wait_for(lambda: len(read(file).splitlines()) >= AT_STEP, f"a step\n{job.output}", 120.0)
    wait_for(lambda: latest(job.run), "a checkpoint")  # it is written beside training
    return job


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


def test_every_host_that_cannot_be_reached_or_has_no_such_python_is_named(network, ssh_config, tmp_path):
    words = ["-H", "worker-2:1,nosuch.invalid:1", "--ssh-config", str(ssh_config), "steps=1"]
    program = "import sys; sys.executable = '/no such/python'; from parallelrun.cli import main as program"
    command = [sys.executable, "-c", f"{program}; sys.exit(program.main({words}))"]
    job = Job(tmp_path, [network.popen("worker-1", *command, output=tmp_path / "output", env=environ())])
    assert job.wait() == [3], job.output
    assert re.search("ssh cannot start parallelrun on worker-2: .*/no such/python", job.output), job.output
    assert "ssh cannot start parallelrun on nosuch.invalid: ssh: Could not resolve hostname" in job.output
    assert f"ssh -F {network.folder}/ssh_config nosuch.invalid" in job.output and "parallelrun doctor" in job.output


@pytest.mark.parametrize("rank", [0, 3, pytest.param(1, marks=LONG), pytest.param(2, marks=LONG)])
def test_a_killed_rank_is_blamed_with_its_host(network, ssh_config, tmp_path, rank):
    """Some wait in gloo for a rank that waits in shared memory for another: each must pass the loss on at once."""
    job = train(network, ssh_config, tmp_path, BOTH)
    host = network.names[rank // 2]
    os.kill(ranks(network, host)[rank % 2], signal.SIGKILL)
    check_failed(job, network, {rank}, host)


@pytest.mark.parametrize(("hosts", "first"), [(BOTH, 2), pytest.param("worker-2:2,worker-1:2", 0, marks=LONG)])
def test_the_ranks_of_a_killed_agent_end_with_it_and_are_blamed(network, ssh_config, tmp_path, hosts, first):
    job = train(network, ssh_config, tmp_path, hosts)
    os.kill(agent(network, "worker-2"), signal.SIGKILL)
    check_failed(job, network, {first, first + 1}, "worker-2")
    assert f"error: the connection to host worker-2 (ranks {first} to {first + 1}) was lost" in job.output


def test_a_killed_launcher_leaves_nothing_but_a_final_status(network, ssh_config, tmp_path):
    job = train(network, ssh_config, tmp_path, BOTH)
    job.processes[0].kill()
    wait_for(lambda: job.status["state"] != "running", f"a final status\n{job.output}", 60.0)
    assert (job.status["state"], job.status["error"]) == ("failed", RANKS_GONE)
    nothing_left(network)


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGINT, 130, "interrupted"), pytest.param(signal.SIGTERM, 75, "preempted", marks=LONG)],
)
def test_a_signal_ends_the_ranks_on_all_hosts(network, ssh_config, tmp_path, number, code, state):
    """Both hosts are reached by ssh, by their addresses."""
    job = train(network, ssh_config, tmp_path, ",".join(f"{network.address(name)}:2" for name in network.names))
    job.processes[0].send_signal(number)
    assert job.wait() == [code], job.output
    assert job.status["state"] == state
    nothing_left(network)


def test_a_host_that_is_cut_off_is_named_and_the_run_ends(network, ssh_config, tmp_path):
    job = train(network, ssh_config, tmp_path, BOTH)
    network.check("worker-2", "ip", "link", "set", "eth0", "down")
    try:
        assert job.wait() == [6], job.output
    finally:
        network.check("worker-2", "ip", "link", "set", "eth0", "up")
    lost = "the connection to host worker-2 (ranks 2 to 3) was lost"
    assert f"error: {lost}" in job.output
    assert (job.status["state"], job.status["failed_rank"]) == ("failed", 2), job.output
    assert job.status["error"] == f"{lost}: it does not answer"
    nothing_left(network)
