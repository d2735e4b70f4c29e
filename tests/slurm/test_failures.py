"""Over two nodes of a real Slurm a rank fails: the right rank and host are blamed, and the job ends in time."""

from __future__ import annotations

import re
import shlex
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests import node_failures
from tests.servants import ROOT
from tests.slurm.cluster import NODES, SlurmCluster, wait
from tests.slurm.test_slurm import TINY, parallelrun, printed, runs

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize(("launcher", "do", "culprit"), node_failures.cells("srun", [("SIGKILL", 3)]))
def test_the_right_rank_and_host_are_blamed_and_the_job_ends(slurm, tmp_path, launcher, do, culprit):
    check(slurm, tmp_path, do, culprit, per_node=2)


@pytest.mark.parametrize(("launcher", "do", "culprit"), node_failures.cells("srun", [("SIGKILL", 0)], ranks=(0, 1)))
def test_also_where_each_rank_is_alone_on_its_node(slurm, tmp_path, launcher, do, culprit):
    """No survivor sees the process that failed."""
    check(slurm, tmp_path, do, culprit, per_node=1)


def check(slurm: SlurmCluster, folder: Path, do: str, culprit: int, per_node: int) -> None:
    """By the file that `parallelrun slurm` prints, with another program for the ranks."""
    ranks = 2 * per_node
    text = parallelrun(folder, "slurm", *TINY, f"dp={ranks}", "nodes=2", f"tasks_per_node={per_node}", "time=20:00")
    words = shlex.join(node_failures.command(folder, ranks))
    text, count = re.subn(r"-m parallelrun .* &$", lambda _: f"{words} &", text, flags=re.MULTILINE)
    assert count == 1, text
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PARALLELRUN_TEST": node_failures.wish(do, culprit)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    script = folder / "job.sh"
    script.write_text(text.replace("ranks=\n", f"{exports}ranks=\n", 1))
    job = slurm.ended(slurm.submit(script, cwd=folder))
    assert job["JobState"] == "FAILED", printed(folder)
    (run,) = runs(folder)
    ended = min(time.time(), datetime.fromisoformat(job["EndTime"]).timestamp() + 1)  # it is in whole seconds
    node_failures.check(run, printed(folder), do, culprit, NODES[culprit // per_node], ended)
    wait(lambda: not any(map(slurm.ranks, NODES)), "the end of all processes", 30)
