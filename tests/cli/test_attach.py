"""Ranks that torchrun and mpirun have started: one run, one voice, one exit code. (srun: tests/unit, by mapping.)"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launcher import ROOT, read, survivors, wait_for

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here (openmpi-bin)")


class Attempt:
    """A program under a launcher of somebody else's. `runs` is where its run directory appears."""

    def __init__(self, launcher: list[str], tmp_path: Path, wish: dict | None = None, **wanted):
        self.runs = tmp_path / "runs"
        text = json.dumps({"overrides": {"dp": 2}, "runs": str(self.runs), **wanted})
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
        environ |= {"PARALLELRUN_TEST": json.dumps(wish or {}), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*launcher, "-m", "tests.cli.attached", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environ, cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def wait(self) -> int:
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.stdout, self.stderr = self.process.communicate()
            raise AssertionError(f"no end in 120 s:\n{self.stdout}\n{self.stderr}") from None
        return self.process.returncode

    @property
    def directory(self) -> Path:
        return wait_for(lambda: next(self.runs.glob("*/*/config.yaml"), None), "run directory").parent

    @property
    def status(self) -> dict:
        return json.loads((self.directory / "status.json").read_text())


@pytest.mark.parametrize("launcher", [TORCHRUN, pytest.param(MPIRUN, marks=needs_mpirun)], ids=["torchrun", "mpirun"])
def test_the_ranks_of_another_launcher_make_one_run(tmp_path, launcher):
    run = Attempt(launcher, tmp_path)
    assert run.wait() == 0, run.stderr
    assert [p.name for p in run.runs.iterdir() if not p.is_symlink()] == ["gpt-ptdp-dp2"]
    assert len(list((run.runs / "gpt-ptdp-dp2").iterdir())) == 1
    assert run.status["state"] == "done" and run.status["step"] == 5
    assert run.stdout.count("speaks") == 1  # rank 0 alone has the terminal
    assert read(run.directory / "logs" / "rank_1.log") == "rank 1 speaks\n"
    manifest = json.loads((run.directory / "manifest.json").read_text())
    assert manifest["hosts"] == [os.uname().nodename]


@needs_mpirun
def test_when_rank_0_cannot_make_a_plan_all_leave_with_its_code(tmp_path):
    run = Attempt(MPIRUN, tmp_path, overrides={"dp": 3})
    assert run.wait() == 2
    assert run.stderr.count("error:") == 1
    assert not run.runs.exists()


@needs_mpirun
def test_a_world_that_is_not_the_plan_s_is_refused_with_both_numbers(tmp_path):
    run = Attempt(MPIRUN, tmp_path, overrides={"dp": 2, "tp": 2})
    assert run.wait() == 2
    assert "mpirun started 2 ranks, the plan has 4" in run.stderr


@needs_mpirun
def test_ranks_with_other_code_are_refused_and_named(tmp_path):
    run = Attempt(MPIRUN, tmp_path, **{"foreign code": 1})
    assert run.wait() == 3
    assert re.search(r"parallelrun's code differs between ranks: rank 0 on \S+ \w+; rank 1 on \S+ ffffffffffff", run.stderr)
    assert run.status["exit_code"] == 3


def test_a_rank_that_fails_under_torchrun_is_named_once_and_in_the_status(tmp_path):
    run = Attempt(TORCHRUN, tmp_path, {"rank": 1, "do": "raise"})
    assert run.wait() == 1  # torchrun's own, for every failure
    assert re.search(r"error: rank 1 \(dp=1 tp=0 pp=0, \S+, pid \d+\): ValueError: the culprit speaks", run.stderr)
    record = json.loads((run.directory / "errors" / "rank_1.json").read_text())
    assert record["exit_code"] == 6


@needs_mpirun
def test_sigterm_to_mpirun_s_ranks_saves_and_exits_75(tmp_path):
    run = Attempt(MPIRUN, tmp_path, {"steps": 100_000})
    pids = [int(wait_for(lambda r=r: read(run.directory / f"started_{r}"), f"rank {r}")) for r in range(2)]
    os.kill(pids[1], signal.SIGTERM)
    assert run.wait() == 75, run.stderr
    assert run.status["state"] == "preempted"
    assert not survivors(pids, 2.0)


@needs_mpirun
def test_a_hang_under_another_launcher_ends_with_7(tmp_path):
    run = Attempt(MPIRUN, tmp_path, {"rank": 1, "do": "sleep"}, timeout_s=3)
    assert run.wait() == 7, run.stderr
    assert "in misbehave" in read(run.directory / "logs" / "rank_1.log")
    assert run.status["exit_code"] == 7
