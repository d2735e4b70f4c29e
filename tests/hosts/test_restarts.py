"""Our launcher over several hosts: a rank or a host that dies is replaced, or the run goes on without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallelrun.checkpoint.find import latest
from parallelrun.launch.guard import LAUNCHER_GONE
from parallelrun.run_records import attempts
from tests.checkpoints import read_whole, same
from tests.cli.launcher import read, survivors, wait_for
from tests.hosts.jobs import Job, environ
from tests.hosts.network import Network, missing
from tests.hosts.test_launchers import TINY
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
LONG = pytest.mark.skipif(not FULL, reason="with --matrix=full")
STEPS, AT_STEP = 60, 8
PROGRAM = ("-m", "parallelrun", *(word for word in TINY if not word.startswith("steps=")),
           "strategy.data.kind=zero1", "checkpoint.keep=3", "eval.every=0")  # fmt: skip
BOTH = "worker-1:2,worker-2:2"


@pytest.fixture
def own(request) -> Iterator[Network]:
    """Hosts that a test may kill: two, or as many as its parameter says."""
    if (reason := missing()) or shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin") is None:
        pytest.skip(reason or "no sshd here (openssh-server)")
    names = [f"worker-{number + 1}" for number in range(getattr(request, "param", 2))]
    found = Network(Path(tempfile.mkdtemp(prefix="parallelrun-hosts-")), names)
    try:
        found.start()
        yield found
    finally:
        found.stop()
        shutil.rmtree(found.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Path:
    """The run that never failed, on one host."""
    folder = tmp_path_factory.mktemp("one host")
    command = [sys.executable, *PROGRAM, f"steps={STEPS}", "checkpoint.every=4", "backend=gloo"]
    subprocess.run(command, cwd=folder, env=environ(), check=True, timeout=400, capture_output=True)
    return next(folder.glob("runs/*/*/config.yaml")).parent


def rows(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and norm by step. No step is there twice."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in found}


def assert_equal(found: dict[int, tuple[float, float]], whole: dict[int, tuple[float, float]]) -> None:
    """The losses are the same bits. Over two hosts even a run that never fails sums norms in another order."""
    assert {step: loss for step, (loss, _) in found.items()} == {step: loss for step, (loss, _) in whole.items()}
    assert [norm for _, norm in found.values()] == pytest.approx([norm for _, norm in whole.values()], rel=1e-14)


def train(
    network: Network, folder: Path, hosts: str, *words: str, at: str = "worker-1", steps: int = STEPS, every: int = 4,
    restarts: int = 2,
) -> Job:  # fmt: skip
    """A launcher on the host `at`, once its ranks have passed some steps, and have saved if they should have."""
    ssh = ("--ssh-config", str(network.serve_ssh()))
    job = Job(folder, [
        network.popen(at, sys.executable, *PROGRAM, f"steps={steps}", f"checkpoint.every={every}",
                      f"restarts={restarts}", "-H", hosts, *ssh, *words,
                      output=folder / "output", env=environ())
    ])  # fmt: skip
    file = job.run / "metrics.jsonl"
    wait_for(lambda: len(read(file).splitlines()) >= AT_STEP, f"a step\n{job.output}", 120.0)
    if 0 < every <= AT_STEP:  # checkpoints are written beside training
        wait_for(lambda: latest(job.run), "a checkpoint")
    return job


def agents(network: Network, name: str) -> list[int]:
    """The agent of a host and its ranks, which are its children."""
    return [pid for pid in network.processes(name) if b"host_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def nothing_left(network: Network) -> None:
    """No agent and no rank lives on any host, or ends within seconds."""
    left = [pid for name in network.names for pid in agents(network, name)]
    assert survivors(left, 15.0) == []


def ranks(network: Network, name: str) -> list[int]:
    """The ranks of a host: children of its agent. The guard of its memory is one, too, in a session of its own."""
    found = agents(network, name)
    fields = {pid: read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() for pid in found}
    return [pid for pid in sorted(found) if int(fields[pid][1]) in found and int(fields[pid][3]) != pid]


def kill(network: Network, name: str) -> None:
    """Kill all of a host but its network, sshd too."""
    for pid in network.processes(name):
        if pid != network.keeper(name):
            os.kill(pid, signal.SIGKILL)


def test_a_rank_that_dies_on_another_host_is_replaced(own, tmp_path, expected):
    job = train(own, tmp_path, BOTH)
    os.kill(ranks(own, "worker-2")[-1], signal.SIGKILL)
    assert job.wait() == [0], job.output
    assert_equal(rows(job.run), rows(expected))
    assert same(read_whole(latest(job.run)), read_whole(latest(expected)))
    first, second = attempts.read(job.run)
    assert (first.rank in (2, 3), first.host, second.world) == (True, "worker-2", 4), job.output
    assert "attempt 1 of 3 has failed" in job.output and second.resumed_step >= 4
    assert list(first.marks) == ["joined", "connected", "built", "noticed", "ended", "hosts"]
    nothing_left(own)


def test_an_agent_that_dies_on_another_host_is_replaced(own, tmp_path, expected):
    job = train(own, tmp_path, BOTH)
    (agent,) = set(agents(own, "worker-2")) - set(ranks(own, "worker-2"))
    os.kill(agent, signal.SIGKILL)
    assert job.wait() == [0], job.output
    assert_equal(rows(job.run), rows(expected))
    first, second = attempts.read(job.run)
    assert (first.rank, first.host, second.world) == (2, "worker-2", 4), job.output
    assert first.error == "the connection to host worker-2 (ranks 2 to 3) was lost"
    nothing_left(own)


def test_processes_of_a_host_that_get_no_time_are_no_cut_network(own, tmp_path):
    """Agent and sshd stand still for longer than a cut network needs to be noticed; the kernel still answers."""
    job = train(own, tmp_path, BOTH, steps=1_000_000)
    stopped = set(own.processes("worker-2")) - set(ranks(own, "worker-2")) - {own.keeper("worker-2")}
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    step = job.status["step"]
    wait_for(lambda: job.status["step"] > step, f"a step\n{job.output}")
    job.processes[0].send_signal(signal.SIGINT)
    assert job.wait() == [130], job.output
    assert job.status["state"] == "interrupted"
    assert len(attempts.read(job.run)) == 1, job.output
    nothing_left(own)


@pytest.mark.parametrize("restarts", [0, 2])
def test_an_agent_that_is_stopped_for_ever_is_replaced_or_ends_the_run(own, tmp_path, restarts):
    """Its ranks go on, until the launcher notices that nobody watches them."""
    job = train(own, tmp_path, BOTH, steps=1_000_000, restarts=restarts)
    (agent,) = set(agents(own, "worker-2")) - set(ranks(own, "worker-2"))
    os.kill(agent, signal.SIGSTOP)
    lost = "the connection to host worker-2 (ranks 2 to 3) was lost: its agent does not answer"
    wait_for(lambda: lost in job.output, f"the notice\n{job.output}", 60.0)
    if restarts:
        wait_for(lambda: len(attempts.read(job.run)) == 2, "the next attempt")
        step = job.status["step"]
        wait_for(lambda: job.status["step"] > step + 4, f"a step\n{job.output}")
        job.processes[0].send_signal(signal.SIGINT)
    assert job.wait() == [130 if restarts else 6], job.output
    assert job.status["state"] == ("interrupted" if restarts else "failed")
    nothing_left(own)


@pytest.mark.parametrize("cut", ["worker-2", pytest.param("worker-1", marks=LONG)])
def test_without_restarts_the_ranks_are_told_that_a_host_is_cut_off_and_end_the_run(own, tmp_path, cut):
    """They would wait in gloo for long: the lowest of them writes the final status, with the host."""
    other = "worker-1" if cut == "worker-2" else "worker-2"
    job = train(own, tmp_path, BOTH, at=other, steps=1_000_000, restarts=0)
    own.check(cut, "ip", "link", "set", "eth0", "down")
    gone = "2 to 3" if cut == "worker-2" else "0 to 1"
    lost = f"the connection to host {cut} (ranks {gone}) was lost: it does not answer"
    wait_for(lambda: f"error: {lost}" in job.output, f"the notice\n{job.output}", 60.0)
    noticed = time.monotonic()
    assert job.wait() == [6], job.output
    print(f"ended {time.monotonic() - noticed:.1f} s after the notice")
    assert (job.status["state"], job.status["exit_code"], job.status["error"]) == ("failed", 6, lost), job.output
    assert job.status["failed_rank"] == (2 if cut == "worker-2" else 0)
    nothing_left(own)


def test_a_killed_launcher_leaves_a_final_status(own, tmp_path):
    job = train(own, tmp_path, BOTH, steps=1_000_000, restarts=0)
    job.processes[0].kill()
    wait_for(lambda: job.status["state"] != "running", f"a final status\n{job.output}", 60.0)
    assert (job.status["state"], job.status["error"]) == ("failed", LAUNCHER_GONE)
    nothing_left(own)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_without_a_host_an_elastic_run_goes_on_with_the_others(own, tmp_path, expected, how):
    job = train(own, tmp_path, BOTH, "elastic=true")
    if how == "killed":
        kill(own, "worker-2")
    else:  # its ranks live on for a while, and must not write into the run that goes on
        own.check("worker-2", "ip", "link", "set", "eth0", "down")
    began = time.time()
    assert job.wait() == [0], job.output
    first, second = attempts.read(job.run)
    print(f"noticed after {first.marks['noticed'] - began:.1f} s, {attempts.parts(first, second)}")  # for the docs
    why = ": it does not answer" if how == "cut off" else ""
    assert first.error == f"the connection to host worker-2 (ranks 2 to 3) was lost{why}"
    assert "warning: worker-2 cannot be reached by ssh: it is left out" in job.output
    assert "elastic: the plan changes from 4 ranks" in job.output
    assert [one.world for one in attempts.read(job.run)] == [4, 2], job.output
    found, whole = rows(job.run), rows(expected)
    assert [found[step][0] for step in found] == pytest.approx([whole[step][0] for step in found], rel=1e-4)
    assert job.status["state"] == "done"
    nothing_left(own)


@LONG
def test_the_host_of_rank_0_is_replaced_by_free_slots(own, tmp_path, expected):
    job = train(own, tmp_path, "worker-1:2,worker-2:4", "-np", "4", at="worker-2")
    kill(own, "worker-1")
    assert job.wait() == [0], job.output
    assert_equal(rows(job.run), rows(expected))
    assert "starting ranks 0 to 3 on worker-2" in job.output
    assert job.status["state"] == "done"


@LONG
def test_too_few_slots_end_the_run_and_say_what_would_go_on(own, tmp_path):
    job = train(own, tmp_path, BOTH)
    kill(own, "worker-2")
    (code,) = job.wait()
    assert code == 6, job.output
    why = "2 slots left for 4 ranks without worker-2; elastic=true goes on with fewer"
    assert f"  not restarted: {why}" in job.output
    assert job.status["state"] == "failed" and why in job.status["error"]
