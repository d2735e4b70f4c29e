"""Hydra's own settings of a sweep and of a run: where files go, who searches, in which directory ranks work."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from parallelrun.base.records import append_jsonl, write_json
from parallelrun.cli import main as program
from parallelrun.cli.sweeps.points import close, exclusive, note, record
from parallelrun.config.schema.run_schema import Config
from parallelrun.report.sweeps import sweep_rows


class Runs:
    """Stands for `launch.entry.start.start`: keeps what each run was started with, and where it worked."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.directories: list[Path | None] = []

    def __call__(self, config, plan, argv, overrides, run_root=None, created=None):
        directory = run_root if run_root is not None else Path("runs/one").absolute()
        directory.mkdir(parents=True, exist_ok=True)
        if created is not None:
            created(directory)
        self.configs.append(config)
        self.directories.append(run_root)
        write_json(directory / "summary.json", {"val_loss": float(plan.degrees["tp"]), "loss": 1.5})
        return 0


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    monkeypatch.chdir(tmp_path)
    runs = Runs()
    monkeypatch.setattr("parallelrun.launch.entry.start.start", runs)
    return runs


def rows(directory: str | Path) -> list[dict]:
    return sweep_rows.read(Path(directory))


def own_folder(**files: str) -> None:
    for name, text in files.items():
        path = Path("own.d") / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_directory_of_a_sweep_may_be_hydras_own_key_with_its_resolvers(runs):
    assert program.main(["-m", "strategy=ddp,tp", "world=2", "hydra.sweep.dir=out/${now:%f}-${hydra.job.name}"]) == 0
    (directory,) = Path("out").iterdir()
    assert directory.name.endswith("-parallelrun") and "$" not in directory.name and len(rows(directory)) == 2
    assert [path.parent for path in runs.directories if path] == [directory.absolute()] * 2
    assert not Path("runs").exists()


def test_the_directories_of_points_may_have_names_of_the_users(runs):
    words = ["-m", "strategy=ddp,tp", "world=2", "hydra.sweep.dir=out", "hydra.sweep.subdir=p${hydra.job.num}"]
    assert program.main(words) == 0
    assert [row["directory"] for row in rows("out")] == ["p0", "p1"]
    assert (Path("out") / "p1" / "summary.json").is_file()


def test_a_name_that_every_point_has_is_numbered_and_one_outside_is_refused(composed_once, runs, capsys):
    assert program.main(["-m", "strategy=ddp,tp", "world=2", "sweep.directory=a", "hydra.sweep.subdir=same"]) == 0
    assert [row["directory"] for row in rows("a")] == ["same", "same-attempt2"]
    assert program.main(["-m", "strategy=ddp,tp", "world=2", "sweep.directory=b", "hydra.sweep.subdir=../x"]) == 2
    assert "hydra.sweep.subdir=../x is outside" in capsys.readouterr().out and len(runs.configs) == 2


def test_a_plan_writes_nothing_whatever_directory_is_named(composed_once, runs):
    assert program.main(["plan", "-m", "strategy=ddp,tp", "world=2", "hydra.sweep.dir=out"]) == 0
    assert list(Path.cwd().iterdir()) == []


EXPERIMENT = """# @package _global_
defaults:
  - override /model: tiny
  - override /strategy: tp
world: 2
"""


def test_a_file_of_the_users_folder_may_ask_for_a_sweep_name_its_values_and_its_directory(composed_once, runs, capsys):
    swept = EXPERIMENT + (
        "hydra:\n  mode: MULTIRUN\n  sweep:\n    dir: found/${hydra.runtime.choices.experiment}\n"
        "  sweeper:\n    params:\n      optimizer.lr: 1e-3,2e-3\n"
    )
    own_folder(model__tiny="name: gpt\nlayers: 2\nhidden: 16\nheads: 2\n", experiment__search=swept)
    assert program.main(["--config-dir", "own.d", "experiment=search", "steps=3"]) == 0
    found = rows("found/search")
    assert [sweep_rows.overridden(row)["optimizer.lr"] for row in found] == ["0.001", "0.002"]
    assert [config.optimizer.lr for config in runs.configs] == [1e-3, 2e-3]
    assert {config.model.layers for config in runs.configs} == {2} and {config.steps for config in runs.configs} == {3}


def test_a_folder_that_mentions_sweeps_changes_no_other_command(composed_once, runs, capsys):
    own_folder(experiment__search="# @package _global_\nhydra:\n  mode: MULTIRUN\n", experiment__one=EXPERIMENT,
               model__tiny="name: gpt\nlayers: 2\nhidden: 16\nheads: 2\n")  # fmt: skip
    assert program.main(["plan", "--json", "--config-dir", "own.d", "experiment=one"]) == 0
    assert json.loads(capsys.readouterr().out)["preset"] == "tp"
    assert program.main(["plan", "--config-dir", "own.d", "-m", "experiment=glob(o*)", "seed=1,2"]) == 0
    assert "2 of 2 points are legal" in capsys.readouterr().out


def test_experiments_are_swept(composed_once, runs):
    for name, degree in (("narrow", 2), ("wide", 4)):
        own_folder(**{f"experiment__{name}": EXPERIMENT.replace("tiny", "gpt").replace("world: 2", f"tp: {degree}")})
    assert program.main(["-m", "--config-dir", "own.d", "experiment=narrow,wide", "steps=1", "sweep.directory=s"]) == 0
    assert [row["tp"] for row in rows("s")] == [2, 4]


def test_an_option_of_the_users_does_not_hide_ours(runs, capsys):
    own_folder(model__gpt="name: gpt\nlayers: 2\n", cluster__mine2="name: mine2\nmemory_gb: 3\n",
               dataset__tiny="name: synthetic\nsamples: 64\n")  # fmt: skip
    words = ["plan", "--json", "--config-dir", "own.d", "model=gpt", "dp=2", "cluster=mine2", "dataset=tiny"]
    assert program.main(words) == 0
    assert json.loads(capsys.readouterr().out)["model"]["layers"] == 8, "Hydra searches --config-dir last"


@pytest.mark.parametrize("before", [["-m"], []], ids=["sweep", "run"])
def test_hydra_may_not_change_the_directory(runs, tmp_path, capsys, before):
    assert program.main([*before, "strategy=ddp", "world=2", "hydra.job.chdir=true", "steps=1"]) == 2
    assert "did you mean: hydra.job.chdir=false" in capsys.readouterr().err
    assert runs.configs == [] and list(tmp_path.iterdir()) == []


def test_a_sweeper_that_is_chosen_in_a_file_gets_answers(runs, monkeypatch):
    from tests.cli.test_sweep_objective import register_sweeper

    answers = register_sweeper(monkeypatch)
    own_folder(experiment__search="# @package _global_\ndefaults:\n  - override /hydra/sweeper: one_by_one\n")
    words = ["-m", "--config-dir", "own.d", "experiment=search", "strategy=ddp,tp", "world=2"]
    assert program.main(words) == 0
    assert answers == [1.0, 2.0]


def noted_by(process: int, monkeypatch, directory: Path, row: dict) -> bool:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: process)
        return note(directory, row)


def test_a_point_whose_process_is_killed_has_a_row_and_notes_of_another_command_are_left(tmp_path, monkeypatch):
    killed = subprocess.Popen(["true"])
    killed.wait()
    lost = {"point": 3, "invocation": 2, "config_sha256": "x", "overrides": ["tp=2"]}
    assert noted_by(killed.pid, monkeypatch, tmp_path, lost)
    assert noted_by(killed.pid, monkeypatch, tmp_path, {**lost, "point": 4, "invocation": 1})
    append_jsonl(tmp_path / sweep_rows.RESULTS, {"point": 0, "invocation": 2, "state": "done", "config_sha256": "y"})
    assert close(tmp_path, 2, 0) == 1
    found = rows(tmp_path)
    assert [(row["point"], row["state"]) for row in found] == [(0, "done"), (3, "failed")]
    assert found[1]["exit_code"] == 6 and "killed" in found[1]["reason"] and found[1]["overrides"] == ["tp=2"]
    assert os.listdir(tmp_path) == [sweep_rows.RESULTS]


def test_a_point_that_still_runs_when_its_launcher_has_given_up_is_waited_for(tmp_path, monkeypatch):
    row = {"point": 0, "invocation": 1, "config_sha256": "x"}
    running = subprocess.Popen(["sleep", "0.3"])
    assert noted_by(running.pid, monkeypatch, tmp_path, row)
    threading.Timer(0.1, lambda: record(tmp_path, {**row, "state": "done"})).start()
    assert close(tmp_path, 1, 0) == 0 and running.wait(0) == 0
    assert [row["state"] for row in rows(tmp_path)] == ["done"]


def test_points_of_a_stopped_sweep_are_ended_and_no_other_starts(tmp_path, monkeypatch):
    row = {"point": 0, "invocation": 1, "config_sha256": "x"}
    running = subprocess.Popen(["sleep", "60"])
    assert close(tmp_path, 5, 130) == 0 and not note(tmp_path, {**row, "invocation": 5}), "before any point"
    assert noted_by(running.pid, monkeypatch, tmp_path, row)
    assert close(tmp_path, 1, 130) == 1
    assert running.wait(5) == -15
    assert [(row["state"], row["exit_code"]) for row in rows(tmp_path)] == [("stopped", 130)]
    assert not note(tmp_path, {**row, "point": 1}), "a point that starts late"
    assert close(tmp_path, 1, 0) == 0
    assert note(tmp_path, {**row, "invocation": 2}), "sweep.resume"


def test_one_process_at_a_time_runs_the_points_of_an_identity(tmp_path):
    """Locks belong to open files, so two threads stand for two processes."""
    entered = threading.Event()

    def enter() -> None:
        with exclusive(tmp_path, "same"):
            entered.set()

    with exclusive(tmp_path, "same"), exclusive(tmp_path, "other"):
        second = threading.Thread(target=enter)
        second.start()
        assert not entered.wait(0.2)
    second.join(10)
    assert entered.is_set()
