"""Runs on a real Slurm of four nodes: started, preempted, out of time, cancelled, and with a node that dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallelrun.report.sweeps import sweep_rows
from tests.extras import needs
from tests.matrix import FULL
from tests.slurm.cluster import SlurmCluster, wait

pytestmark = pytest.mark.slurm
slow = pytest.mark.skipif(not FULL, reason="more than a minute each: with --matrix=full")
TINY = (
    "model=gpt", "strategy=ptdp", "dataset=synthetic", "model.layers=2", "model.hidden=16", "model.heads=2",
    "model.seq=8", "eval.batches=1", "global_batch=4", "checkpoint.keep=2",
)  # fmt: skip
STEPS = 1000  # more seconds than it takes Slurm to preempt a job
LONG = (f"steps={STEPS}", "checkpoint.every=100", "optimizer.schedule=constant")


def parallelrun(folder: Path, *words: str) -> str:
    """What the program prints."""
    done = subprocess.run(
        [sys.executable, "-m", "parallelrun", *words], cwd=folder, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submit(slurm: SlurmCluster, folder: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    """Write the batch file of a run and submit it; the job's number."""
    script = folder / "job.sh"
    script.write_text(parallelrun(folder, "slurm", *TINY, *words))
    return slurm.submit(script, *options, cwd=folder)


def runs(folder: Path) -> list[Path]:
    """Run directories, the oldest first."""
    found = [path.parent for path in (folder / "runs").glob("*/*/status.json")]
    return sorted((path for path in found if not path.parent.is_symlink()), key=lambda path: path.name)


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "status.json").read_text())
    return found


def losses(*directories: Path) -> dict[int, float]:
    """The loss of each step, of several runs one after the other."""
    files = [path for one in directories if (path := one / "metrics.jsonl").exists()]
    rows = [json.loads(row) for path in files for row in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def printed(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


def test_a_run_over_four_nodes_is_the_run_of_our_own_launcher(slurm, tmp_path):
    number = submit(slurm, tmp_path, "tp=2", "dp=2", "steps=4", "nodes=4", "tasks_per_node=1", "time=10:00")
    assert slurm.ended(number)["JobState"] == "COMPLETED", printed(tmp_path)
    (run,) = runs(tmp_path)
    assert json.loads((run / "manifest.json").read_text())["hosts"] == ["n0", "n1", "n2", "n3"]
    assert (status(run)["state"], status(run)["step"]) == ("done", 4)
    parallelrun(tmp_path, *TINY, "tp=2", "dp=2", "steps=4", "name=own", "runs=here", "backend=gloo")
    (own,) = (tmp_path / "here").glob("own/*/metrics.jsonl")
    assert losses(run) == losses(own.parent)


def test_a_preempted_job_saves_and_goes_on_with_the_same_bits(slurm, tmp_path):
    number = submit(slurm, tmp_path, *LONG, "dp=2", "nodes=2", "tasks_per_node=1", "time=20:00")
    (first,) = wait(lambda: runs(tmp_path), "the first run", state=lambda: printed(tmp_path))
    wait(lambda: status(first)["step"] > 20, "some steps", state=lambda: printed(tmp_path))
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 3\n")
    other = slurm.submit(urgent, "--partition=urgent", "--nodes=4", "--exclusive", cwd=tmp_path)
    assert slurm.ended(other)["JobState"] == "COMPLETED"
    assert slurm.ended(number)["JobState"] == "COMPLETED", printed(tmp_path)
    first, second = runs(tmp_path)
    assert (status(first)["state"], status(first)["exit_code"]) == ("preempted", 75)
    assert 20 < status(first)["step"] < STEPS == status(second)["step"]
    assert min(losses(second)) == status(first)["step"] + 1
    assert slurm.job(number)["Restarts"] == "1"
    parallelrun(tmp_path, *TINY, *LONG, "dp=2", "name=whole", "runs=here", "backend=gloo")
    (whole,) = (tmp_path / "here").glob("whole/*/metrics.jsonl")
    assert losses(first, second) == losses(whole.parent)


@slow
def test_a_job_whose_time_is_over_saves_and_is_queued_again(slurm, tmp_path):
    words = ("steps=10000000", "dp=1", "nodes=1", "tasks_per_node=1", "time=1", "save_s=20")
    number = submit(slurm, tmp_path, *words)
    wait(lambda: slurm.job(number).get("Restarts") == "1", "a place in the queue", state=lambda: printed(tmp_path))
    (first,) = runs(tmp_path)
    assert (status(first)["state"], status(first)["exit_code"]) == ("preempted", 75), printed(tmp_path)
    slurm.start_now(number)
    wait(lambda: len(runs(tmp_path)) == 2, "the second run", state=lambda: slurm.job(number))
    saved = status(first)["step"]
    wait(lambda: losses(runs(tmp_path)[1]), "its first step", state=lambda: printed(tmp_path))
    assert min(losses(runs(tmp_path)[1])) == saved + 1


def test_scancel_saves_and_leaves_no_process(slurm, tmp_path):
    number = submit(slurm, tmp_path, *LONG, "dp=2", "nodes=2", "tasks_per_node=1", "time=20:00")
    (run,) = wait(lambda: runs(tmp_path), "the run", state=lambda: printed(tmp_path))
    wait(lambda: status(run)["step"] > 20, "some steps", state=lambda: printed(tmp_path))
    slurm.run("scancel", number)
    assert slurm.ended(number)["JobState"] == "CANCELLED"
    wait(lambda: status(run)["state"] != "running", "a final status", state=lambda: status(run))
    assert (status(run)["state"], status(run)["exit_code"]) == ("preempted", 75), status(run)
    assert (run / "checkpoints" / f"step_{status(run)['step']}").is_dir()
    wait(lambda: not any(map(slurm.ranks, ("n0", "n1"))), "the end of all ranks")


@slow
def test_a_job_goes_on_without_the_node_that_died(slurm, tmp_path):
    number = submit(slurm, tmp_path, *LONG, "dp=2", "nodes=2", "tasks_per_node=1", "time=20:00")
    (first,) = wait(lambda: runs(tmp_path), "the run", state=lambda: printed(tmp_path))
    wait(lambda: status(first)["step"] > 120, "a checkpoint", state=lambda: printed(tmp_path))
    slurm.kill_node("n1")
    assert slurm.ended(number)["JobState"] == "COMPLETED", printed(tmp_path)
    first, second = runs(tmp_path)
    assert (status(first)["state"], status(first)["failed_rank"]) == ("failed", 1), status(first)
    assert "n1" not in json.loads((second / "manifest.json").read_text())["hosts"]
    assert min(losses(second)) > 100 and status(second)["step"] == STEPS


@needs("hydra_plugins.hydra_submitit_launcher")
@pytest.mark.parametrize(("nodes", "tasks"), [(2, 1), pytest.param(1, 2, marks=slow)])
def test_each_point_of_a_sweep_is_a_job_whose_tasks_join(slurm, tmp_path, nodes, tasks):
    """Two legal points and an illegal one, each of two tasks: what cannot begin must not keep its other task."""
    place = (f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={tasks}", "hydra.launcher.mem_gb=1")
    words = ("-m", "hydra/launcher=slurm", *place, "world=2", "steps=3")
    done = subprocess.run(
        [sys.executable, "-m", "parallelrun", *words, "strategy=ddp,ring,single", *TINY[2:]], cwd=tmp_path,
        env=slurm.environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = (tmp_path / "runs").glob("sweep-*")
    rows = sorted(sweep_rows.read(directory), key=lambda row: row["point"])
    assert [row["state"] for row in rows] == ["done", "done", "skipped"]
    for row in rows[:2]:
        manifest = json.loads((directory / row["directory"] / "manifest.json").read_text())
        assert len(manifest["hosts"]) == nodes and row["communication_as_predicted"]
    wait(lambda: slurm.run("squeue", "-h") == "", "the end of all jobs", 60)
