"""Hydra's launchers and its optimizing sweeper as they are installed, with real runs: the extra `sweep`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from parallelrun.cli.main import main
from parallelrun.report.sweeps import sweep_rows
from tests.extras import needs

TINY = ("dataset=synthetic", "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq=16", "steps=2",
        "global_batch=4", "eval.every=0", "eval.batches=1")  # fmt: skip


def program(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-m", "parallelrun", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def the_sweep(folder: Path) -> Path:
    (directory,) = (folder / "runs").glob("sweep-*")
    return directory


@needs("hydra_plugins.hydra_joblib_launcher")
def test_joblib_runs_points_side_by_side_each_once_with_its_own_cores(tmp_path):
    """Two different points, a repetition of the first one and an illegal one, in two processes."""
    words = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "strategy=ddp,single", "world=2")
    done = program(*words, "optimizer.lr=1e-3,2e-3,0.001", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    directory = the_sweep(tmp_path)
    rows = sweep_rows.read(directory)
    assert [row["point"] for row in rows] == list(range(6))
    assert sorted(row["state"] for row in rows) == ["done", "done", "skipped", "skipped", "skipped", "skipped"]
    ran = {row["point"]: row for row in rows if row["state"] == "done"}
    assert len({row["directory"] for row in ran.values()}) == 2 and 1 in ran
    assert {row["optimizer.lr"] for row in map(sweep_rows.overridden, ran.values())} == {"0.001", "0.002"}
    cores = len(os.sched_getaffinity(0))
    for row in ran.values():
        manifest = json.loads((directory / row["directory"] / "manifest.json").read_text())
        assert manifest["cores"] == max(1, cores // 2), "half of the host"
        assert row["communication_as_predicted"] and row["val_loss"]
    assert (directory / "results.csv").read_text().count("\n") == 7 and not (directory / ".points").exists()


@needs("hydra_plugins.hydra_submitit_launcher")
def test_submitit_runs_each_point_in_its_own_process_from_any_directory(tmp_path):
    """Also in a directory that nobody can write to, with the files elsewhere."""
    words = ("-m", "hydra/launcher=submitit_local", "strategy=ddp", "world=3,2", f"runs={tmp_path}/runs")
    done = program(*words, *TINY, cwd=Path("/proc/self"))
    assert done.returncode == 0, done.stdout + done.stderr
    directory = the_sweep(tmp_path)
    rows = sweep_rows.read(directory)
    assert [(row["point"], row["state"]) for row in rows] == [(0, "skipped"), (1, "done")], "3 does not divide 4"
    assert rows[1]["val_loss"] and (directory / rows[1]["directory"] / "metrics.jsonl").is_file()
    jobs = list((directory / "hydra" / ".submitit").rglob("*_0_log.out"))
    assert len(jobs) == 2 and not (directory / ".points").exists()


@needs("hydra_plugins.hydra_optuna_sweeper")
@needs("hydra_plugins.hydra_joblib_launcher")
def test_optuna_searches_with_several_processes_and_reads_its_space_from_a_file(tmp_path):
    """What a point answers is its predicted time; an illegal point is a failed trial, and the search goes on."""
    experiment = tmp_path / "own.d" / "experiment" / "search.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(
        "# @package _global_\ndefaults:\n  - override /strategy: ddp\n  - override /cluster: a100_dgx\n"
        "  - override /hydra/sweeper: optuna\n  - override /hydra/launcher: joblib\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    n_trials: 6\n    n_jobs: 2\n    sampler:\n      seed: 1\n"
        "    params:\n      world: choice(1,2,5)\n"
    )
    done = program("plan", "--json", "--config-dir", "own.d", "experiment=search", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(done.stdout)["points"]
    found = {point["overrides"][0]: point["state"] for point in points if "same_as" not in point}
    assert len(points) == 6 and found == {"world=1": "planned", "world=2": "planned", "world=5": "skipped"}
    assert os.listdir(tmp_path) == ["own.d"]


def test_a_launcher_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "hydra/launcher=basik", "world=1,2"]) == 2
    said = capsys.readouterr().err
    assert "hydra/launcher=basik: no such hydra/launcher" in said and "did you mean: hydra/launcher=basic" in said
    assert list(tmp_path.iterdir()) == []
