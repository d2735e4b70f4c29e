"""Over two nodes of a real Slurm a rank fails: the right rank and host are blamed, and the job ends in time."""

from __future__ import annotations

import re
import shlex
import time
from datetime import datetime

import pytest

from tests import node_failures
from tests.servants import ROOT
from tests.slurm.cluster import NODES
from tests.slurm.test_slurm import TINY, parallelrun, printed, runs

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(("launcher", "do", "culprit"), node_failures.cells("srun", [("SIGKILL", 3)]))
def test_the_right_rank_and_host_are_blamed_and_the_job_ends(slurm, tmp_path, launcher, do, culprit):
    """By the file that `parallelrun slurm` prints, with another program for the ranks."""
    text = parallelrun(tmp_path, "slurm", *TINY, "dp=4", "nodes=2", "tasks_per_node=2", "time=20:00")
    words = shlex.join(node_failures.command(tmp_path))
    text, count = re.subn(r"-m parallelrun .* &$", lambda _: f"{words} &", text, flags=re.MULTILINE)
    assert count == 1, text
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PARALLELRUN_TEST": node_failures.wish(do, culprit)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    script = tmp_path / "job.sh"
    script.write_text(text.replace("ranks=\n", f"{exports}ranks=\n", 1))
    job = slurm.ended(slurm.submit(script, cwd=tmp_path))
    assert job["JobState"] == "FAILED", printed(tmp_path)
    (run,) = runs(tmp_path)
    ended = min(time.time(), datetime.fromisoformat(job["EndTime"]).timestamp() + 1)  # it is in whole seconds
    node_failures.check(run, printed(tmp_path), do, culprit, NODES[culprit // 2], ended)
