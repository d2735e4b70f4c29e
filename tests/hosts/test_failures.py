"""Over two hosts, under real launchers, a rank fails: the right rank and host are blamed, and the job ends in time."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from tests import node_failures
from tests.hosts.jobs import by_mpirun, by_torchrun

pytestmark = pytest.mark.hosts
CELLS = [
    *node_failures.cells("torchrun", [("SIGKILL", 3)]),
    *node_failures.cells("mpirun", [("SIGSTOP", 0)]),
]


@pytest.mark.parametrize(("launcher", "do", "culprit"), CELLS)
def test_the_right_rank_and_host_are_blamed_and_the_job_ends(network, request, tmp_path, launcher, do, culprit):
    words, variables = node_failures.command(tmp_path), {"PARALLELRUN_TEST": node_failures.wish(do, culprit)}
    if launcher == "torchrun":
        job = by_torchrun(network, tmp_path, words, **variables)
    elif shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (openmpi-bin)")
    else:
        job = by_mpirun(network, tmp_path, words, request.getfixturevalue("ssh_config"), **variables)
    codes = job.wait()
    ended = time.time()
    assert all(codes), job.output
    node_failures.check(job.run, job.output, do, culprit, network.names[culprit // 2], ended)


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
