"""Over two hosts, under real launchers, a rank fails: the right rank and host are blamed, and the job ends in time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallelrun.launch.failures.reach import LAUNCHER_LOST
from tests import node_failures
from tests.cli.launcher import read, survivors, wait_for
from tests.hosts.jobs import PATIENCE_S, Job, by_mpirun, by_torchrun
from tests.hosts.network import Network
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
LONG = pytest.mark.skipif(not FULL, reason="with --matrix=full")
TWO_EACH = [
    *node_failures.cells("torchrun", [("SIGKILL", 3)]),
    *node_failures.cells("mpirun", [("SIGSTOP", 0)]),
]
ONE_EACH = [
    pytest.param(launcher, do, rank, marks=[] if (launcher, do, rank) == ("torchrun", "SIGSTOP", 1) else LONG)
    for launcher in ("torchrun", "mpirun")
    for do in node_failures.CODES
    for rank in (0, 1)
]
CUTS = [
    pytest.param(launcher, ranks, cut, marks=[] if (ranks, cut) == (1, 0) else LONG)
    for launcher in ("torchrun", "mpirun")
    for ranks in (1, 2)
    for cut in (0, 1)
]


@pytest.fixture
def start(network, request, tmp_path) -> Callable[..., Job]:
    """Returns the job of a launcher with so many ranks on each host, of which one may misbehave."""

    def started(launcher: str, ranks: int, do: str = "", culprit: int = -1) -> Job:
        words, wish = node_failures.command(tmp_path, ranks * 2), node_failures.wish(do, culprit)
        if launcher == "torchrun":
            return by_torchrun(network, tmp_path, words, ranks, PARALLELRUN_TEST=wish)
        if shutil.which("mpirun") is None:
            pytest.skip("no mpirun here (openmpi-bin)")
        ssh_config = request.getfixturevalue("ssh_config")
        return by_mpirun(network, tmp_path, words, ssh_config, ranks, PARALLELRUN_TEST=wish)

    return started


def nothing_left(network: Network) -> None:
    """No rank, launcher or guard lives on any host, or ends within seconds."""
    pids = [pid for name in network.names for pid in network.processes(name) if pid != network.keeper(name)]
    left = survivors([pid for pid in pids if "sshd" not in read(Path(f"/proc/{pid}/cmdline"))], 10.0)
    assert left == [], [read(Path(f"/proc/{pid}/cmdline")) for pid in left]


def writer(run: Path) -> int:
    """The rank that has written the final status."""
    pid = str(json.loads((run / "status.json").read_text())["pid"])
    return next(int(path.name.rpartition("_")[2]) for path in run.glob("started_*") if path.read_text() == pid)


def check(network: Network, start: Callable[..., Job], launcher: str, ranks: int, do: str, culprit: int) -> None:
    job = start(launcher, ranks, do, culprit)
    codes = job.wait()
    ended = time.time()
    assert all(codes), job.output
    node_failures.check(job.run, job.output, do, culprit, network.names[culprit // ranks], ended)
    assert writer(job.run) == (1 if culprit == 0 and do != "raise" else 0), "the lowest survivor"
    nothing_left(network)


@pytest.mark.parametrize(("launcher", "do", "culprit"), TWO_EACH)
def test_the_right_rank_and_host_are_blamed_and_the_job_ends(network, start, launcher, do, culprit):
    check(network, start, launcher, 2, do, culprit)


@pytest.mark.parametrize(("launcher", "do", "culprit"), ONE_EACH)
def test_so_they_are_with_one_rank_on_each_host(network, start, launcher, do, culprit):
    """No other rank sees the process of the one that has failed."""
    check(network, start, launcher, 1, do, culprit)


def begun(job: Job) -> Path:
    """The run directory, when some steps are done."""
    wait_for(lambda: (job.run / "status.json").exists() and job.status.get("step", 0) >= 20, job.output, PATIENCE_S)
    return job.run


def check_loss(job: Job, lost: set[int], error: str) -> None:
    """The run has failed in time because of one of the ranks `lost`. It was begun, and the fault is new."""
    began = time.time()
    assert all(job.wait()), job.output
    wait_for(lambda: job.status["state"] != "running", f"a final status\n{job.output}")  # its launcher may be killed
    took, found = time.time() - began, job.status
    print(f"took {took:.1f} s: {found['error']}")
    assert (found["state"], found["exit_code"], found["error"]) == ("failed", 6, error), job.output
    assert found["failed_rank"] in lost, job.output
    assert writer(job.run) in (0, 1), "the first to notice of the host of rank 0, or of two hosts with one rank"
    assert took < node_failures.TIMEOUT_S + 10 + node_failures.SLACK_S


@pytest.mark.parametrize(("launcher", "ranks", "cut"), CUTS)
def test_the_same_host_is_lost_whichever_of_two_is_cut_off(network, start, launcher, ranks, cut):
    """Each sees only that the other does not answer: that of rank 0 is right."""
    job = start(launcher, ranks)
    begun(job)
    network.check(network.names[cut], "ip", "link", "set", "eth0", "down")
    try:
        name = network.names[1]
        text = "rank 1" if ranks == 1 else "ranks 2 to 3"
        check_loss(job, {ranks}, f"the connection to host {name} ({text}) was lost: it does not answer")
        nothing_left(network)
    finally:
        network.check(network.names[cut], "ip", "link", "set", "eth0", "up")
    assert f"error: the connection to host {network.names[1]} (" in job.output, job.output


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=LONG)])
def test_the_ranks_of_a_killed_torchrun_end_with_it(network, start, host):
    job = start("torchrun", 2)
    begun(job)
    job.processes[host].kill()
    check_loss(job, {2 * host, 2 * host + 1}, LAUNCHER_LOST)
    assert f", {network.names[host]}, pid " in job.output, job.output
    nothing_left(network)


@LONG
def test_the_ranks_of_a_killed_mpirun_end_with_it(network, start):
    job = start("mpirun", 2)
    begun(job)
    job.processes[0].kill()
    check_loss(job, {0, 1}, LAUNCHER_LOST)
    nothing_left(network)


def test_every_rank_of_two_hosts_is_watched_and_a_stall_is_told(network, tmp_path):
    """`top` shows the ranks of both hosts; then one of them sleeps."""
    wish = {"steps": 100_000, "rank": 3, "do": "sleep", "step": 60, "pause": 0.1}
    job = by_torchrun(network, tmp_path, node_failures.command(tmp_path), PARALLELRUN_TEST=json.dumps(wish))
    rows: list[dict[str, object]] = []
    while len(rows) < 4 or any("step" not in row for row in rows):
        time.sleep(0.2)
        if (job.run / "status.json").exists():  # the directory is made first
            rows = job.status.get("ranks") or rows
            assert job.status["state"] == "running", f"{rows}\n{job.output}"
    assert [(row["rank"], row["host"]) for row in rows] == [(n, network.names[n // 2]) for n in range(4)]
    job.wait()
    stalled, (missing,) = job.status["stall"], job.status["stall"]["missing"]
    assert (stalled["operation"], stalled["axis"], stalled["number"], stalled["arrived"]) == (
        "all_reduce",
        "dp",
        60,
        [0, 1, 2],
    )
    assert (missing["rank"], missing["host"], missing["activity"]) == (3, network.names[1], "sleeps"), job.output
    assert "in misbehave: time.sleep(1000)" in missing["frames"][0] and job.output.count("error: rank 3") == 1
