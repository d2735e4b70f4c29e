"""Which checkpoint a run goes on from, beside runs that are alive and delete theirs. Torch-free, no processes."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from parallelrun.base.errors import CheckpointError
from parallelrun.checkpoint import find, resume
from parallelrun.checkpoint.find import complete_steps
from parallelrun.checkpoint.resume import Chosen, choose, hold, newest, resolve_resume
from parallelrun.checkpoint.schema import read_index
from parallelrun.launch.entry import start as launcher
from parallelrun.planner.resolve.freeze import freeze
from parallelrun.training.loop.checkpointing import due
from tests.checkpoints import written
from tests.plans import tiny_config, tiny_plan

SMALL = {"model.layers": 1}


def run_of(folder, step_time, **changes):
    """A run directory under `folder` with config.yaml and a checkpoint written at a time; the checkpoint."""
    changes = {**SMALL, **{key.replace("__", "."): value for key, value in changes.items()}}
    plan = tiny_plan(changes)
    path = written(folder / "checkpoints" / "step_3", plan)
    (folder / "config.yaml").write_text(freeze(tiny_config(changes), plan))
    os.utime(path / "index.json", (step_time, step_time))
    return path


def auto(runs, **changes):
    changes = {**SMALL, "resume": "auto", "runs": str(runs), **{k.replace("__", "."): v for k, v in changes.items()}}
    found = choose(tiny_config(changes), tiny_plan(changes))
    return found and found.path


def chosen(path):
    return Chosen(path, read_index(path))


class TestAuto:
    def test_the_first_start_is_fresh(self, tmp_path):
        assert auto(tmp_path / "runs") is None

    def test_the_newest_state_of_this_training_is_taken_under_any_plan(self, tmp_path):
        run_of(tmp_path / "gpt-ddp" / "a", 100)
        newer = run_of(tmp_path / "gpt-tp" / "b", 200, tp=2)
        assert auto(tmp_path) == auto(tmp_path, dp=2) == auto(tmp_path, steps=99) == newer

    @pytest.mark.parametrize(
        "other",
        [
            {"seed": 5},
            {"optimizer__lr": 0.5},
            {"model__layers": 2},
            {"dropout": 0.1},
            {"global_batch": 4},
            {"dataset__samples": 128},
        ],
    )
    def test_a_newer_state_of_another_training_is_left_alone(self, tmp_path, other):
        mine = run_of(tmp_path / "gpt-ddp" / "a", 100)
        run_of(tmp_path / "gpt-ddp" / "b", 200, **other)
        assert auto(tmp_path) == mine

    def test_a_damaged_one_is_passed_over(self, tmp_path):
        older = run_of(tmp_path / "gpt-ddp" / "a", 100)
        (run_of(tmp_path / "gpt-ddp" / "b", 200) / "index.json").write_text("torn")
        assert auto(tmp_path) == older


class TestBesideALiveRun:
    """`checkpoint.keep=1`: what was listed a moment ago is deleted, and the next step is there."""

    @pytest.fixture
    def live(self, tmp_path, monkeypatch):
        """A run that saves the next step and deletes the old one whenever somebody has listed or checked its steps."""
        folder = tmp_path / "runs" / "gpt" / "a"
        run_of(folder, 100)
        steps, moves = [3], [0]

        def move(*_):
            if moves[0] < 3:
                moves[0] += 1
                old, steps[0] = steps[0], steps[0] + 1
                shutil.copytree(folder / "checkpoints" / f"step_{old}", folder / "checkpoints" / f"step_{steps[0]}")
                shutil.rmtree(folder / "checkpoints" / f"step_{old}")

        return folder, move, monkeypatch

    @pytest.mark.parametrize("asked", ["latest", "auto", "run"])
    @pytest.mark.parametrize("moment", ["listed", "chosen"])
    def test_the_newest_step_is_found_all_the_same(self, live, asked, moment):
        folder, move, monkeypatch = live
        if moment == "listed":
            real = find.open_complete
            monkeypatch.setattr(find, "open_complete", lambda path: (move(), real(path))[1])
        else:
            real_check = resume._check
            monkeypatch.setattr(resume, "_check", lambda path, plan: (move(), real_check(path, plan))[1])
        changes = {**SMALL, "resume": str(folder) if asked == "run" else asked, "runs": str(folder.parents[1])}
        assert choose(tiny_config(changes), tiny_plan(changes)).path == folder / "checkpoints" / "step_6"

    def test_the_start_takes_the_newer_one_that_is_there_when_the_chosen_one_is_gone(self, live, tmp_path, monkeypatch):
        """Whatever is deleted after it was chosen: nothing of it is read again but what is held."""
        folder, move, _ = live
        real = launcher.hold
        monkeypatch.setattr(launcher, "hold", lambda found, place: (move(), real(found, place))[1])
        monkeypatch.setattr(launcher, "_inline", lambda *_: 1 / 0)
        changes = {**SMALL, "resume": str(folder), "runs": str(tmp_path / "new"), "steps": 99}
        with pytest.raises(ZeroDivisionError):
            launcher.start(tiny_config(changes), tiny_plan(changes), [], [])
        [run] = (tmp_path / "new" / "gpt-ptdp-one").iterdir()
        held = [path.name for path in (run / "checkpoints").iterdir()]
        manifest = json.loads((run / "manifest.json").read_text())
        assert manifest["resumed"]["checkpoint"] == str(folder / "checkpoints" / "step_6") and held == ["step_3"]

    def test_what_is_held_outlives_its_deletion(self, live, tmp_path):
        folder, move, _ = live
        path = folder / "checkpoints" / "step_3"
        held = hold(chosen(path), tmp_path / "new")
        content = {file.name: file.read_bytes() for file in path.iterdir()}
        move()
        assert not path.exists() and held == tmp_path / "new" / "checkpoints" / "step_3"
        assert {file.name: file.read_bytes() for file in held.iterdir()} == content
        assert list(complete_steps(tmp_path / "new")) == [3]

    def test_what_is_gone_cannot_be_held(self, live, tmp_path):
        folder, move, _ = live
        gone = chosen(folder / "checkpoints" / "step_3")
        move()
        assert hold(gone, tmp_path / "new") is None

    def test_without_links_it_stays_where_it_is(self, live, tmp_path, monkeypatch):
        def no_links(*_):
            raise PermissionError

        monkeypatch.setattr(os, "link", no_links)
        path = live[0] / "checkpoints" / "step_3"
        assert hold(chosen(path), tmp_path / "new") == path and os.listdir(tmp_path / "new" / "checkpoints") == []


def test_the_number_of_runs_is_said(tmp_path):
    run_of(tmp_path / "gpt" / "a", 200)
    run_of(tmp_path / "gpt" / "b", 100)
    found = newest(tmp_path)
    assert (found.num_runs, found.run) == (2, tmp_path / "gpt" / "a")


def test_a_name_means_its_newest_run_with_a_checkpoint(tmp_path, monkeypatch):
    older, newer = (run_of(tmp_path / "gpt" / name, 100).parents[1] for name in ("1", "2"))
    (tmp_path / "gpt" / "3").mkdir()  # the run that resumes
    for run in (older, newer, tmp_path / "gpt" / "3"):
        (run / "config.yaml").write_text("{}")
    for name in ("gpt", "gpt/", str(tmp_path / "gpt"), "gpt/2"):
        assert resolve_resume(name, str(tmp_path)).parents[1] == newer
    with pytest.raises(CheckpointError, match="no complete checkpoint in") as caught:
        resolve_resume("gpt/3", str(tmp_path))
    (problem,) = caught.value.problems
    assert problem.suggestion == f"{resolve_resume('gpt', str(tmp_path))}, the newest of other runs"
    with pytest.raises(CheckpointError, match=r"no such checkpoint: .*nothing$"):
        resolve_resume("nothing", str(tmp_path))
    here = run_of(tmp_path / "elsewhere" / "gpt", 100)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve_resume("gpt", str(tmp_path)) == here, "a path that exists comes before a name"


def test_a_configuration_that_cannot_be_read_is_a_bad_checkpoint(tmp_path):
    run = run_of(tmp_path / "gpt" / "a", 100).parents[1]
    for text in ("{", "steps: [", "steps: two", "nosuch: 1", "- 1", "x" * 2**21):
        (run / "config.yaml").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.yaml"):
            resume.saved_config(run)
    (run / "config.yaml").unlink()
    assert resume.saved_config(run) is None and resolve_resume("latest", str(tmp_path)).parents[1] == run


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({}, [9]),
        ({"checkpoint.last": False}, []),
        ({"checkpoint.last": False, "resume": "latest"}, [9]),
        ({"checkpoint.every": 4}, [4, 8, 9]),
    ],
)
def test_a_run_keeps_its_last_state_unless_told_otherwise_and_a_resumed_one_always(changes, saved):
    config = tiny_config({"steps": 9, **changes})
    assert [step for step in range(1, 10) if due(config, step, False)] == saved
