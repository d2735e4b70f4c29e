"""Over two hosts, under real launchers, a rank fails: the right rank and host are blamed, and the job ends in time."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from tests.hosts.jobs import by_mpirun, by_torchrun
from tests.matrix import FULL

pytestmark = pytest.mark.hosts
TIMEOUT_S = 20
CODES = {"raise": 6, "segfault": 6, "SIGKILL": 6, "SIGSTOP": 7}
ALWAYS = (("torchrun", "SIGKILL", 3), ("mpirun", "SIGSTOP", 0))
CELLS = [
    pytest.param(launcher, do, rank, marks=[] if FULL or (launcher, do, rank) in ALWAYS else pytest.mark.skip("FULL"))
    for launcher in ("torchrun", "mpirun")
    for do in CODES
    for rank in (0, 1, 2, 3)
]


@pytest.mark.parametrize(("launcher", "do", "culprit"), CELLS)
def test_the_right_rank_and_host_are_blamed_and_the_job_ends(network, request, tmp_path, launcher, do, culprit):
    wanted = {"overrides": {"dp": 4}, "runs": str(tmp_path / "runs"), "timeout_s": TIMEOUT_S}
    wish = {"steps": 100_000, "rank": culprit, "do": do, "step": 20}
    words = ["-m", "tests.cli.attached", json.dumps(wanted)]
    if launcher == "torchrun":
        job = by_torchrun(network, tmp_path, words, PARALLELRUN_TEST=json.dumps(wish))
    elif shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (openmpi-bin)")
    else:
        ssh_config = request.getfixturevalue("ssh_config")
        job = by_mpirun(network, tmp_path, words, ssh_config, PARALLELRUN_TEST=json.dumps(wish))
    codes = job.wait()
    ended = time.time()
    assert all(codes), job.output
    found = job.status
    host = network.names[culprit // 2]
    assert (found["state"], found["failed_rank"], found["exit_code"]) == ("failed", culprit, CODES[do]), job.output
    assert f"error: rank {culprit} (dp={culprit} tp=0 pp=0, {host}, pid " in job.output
    took = ended - (job.run / f"at_{culprit}").stat().st_mtime
    print(f"took {took:.1f} s")
    assert took < TIMEOUT_S + 10 + 60  # on a busy machine; without one of those waits of 30 s that launchers have
