"""How much a run writes is known before it starts, and compared with what is free."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from parallelrun.launch.entry import start
from parallelrun.launch.host import directory, preflight
from parallelrun.planner.resolve.freeze import load_frozen
from parallelrun.planner.resolve.resolve_config import resolve
from tests.cli.launcher import run_program
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

MODEL = ["model=gpt", "dataset=synthetic", "model.layers=2", "model.hidden=128", "model.seq=16", "eval.every=0"]
RUNS = {
    "adamw": (["strategy=ddp", "dp=2"], 2),
    "sgd": (["strategy=tp", "tp=2", "optimizer=sgd", "precision=fp64"], 2),
    "diloco": (["strategy=diloco", "dp=2", "strategy.data.sync_every=2"], 2),
    "servers": (["strategy=ps", "dp=2", "servers=1"], 3),
    "experts": (["strategy=gshard", "dp=2", "ep=2", "model.experts=4", "model.expert_period=1"], 2),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs of four steps with a checkpoint after the second and the last, all at once."""
    folder = tmp_path_factory.mktemp("disk")
    words = [*MODEL, "steps=4", "checkpoint.every=2", "global_batch=8"]
    return {
        name: run_program(folder / name / "process", [*words, *more], {}, world) for name, (more, world) in RUNS.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_writes_is_what_was_predicted(ended, name):
    run = ended[name]
    assert run.wait() == 0, run.stderr
    config = load_frozen((run.directory / "config.yaml").read_text())
    plan = resolve(config)
    need = preflight.disk_need(config, plan)
    assert need.num_checkpoints == 2
    steps = sorted((run.directory / "checkpoints").glob("step_*"))
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in steps]
    assert sizes == pytest.approx([need.checkpoint_bytes] * 2, rel=0.03)
    records = sum(file.stat().st_size for file in run.directory.glob("*.jsonl"))
    assert records / 3 < need.record_bytes < records * 3


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"checkpoint.every": 10}, 3),  # two kept, and the one being written
        ({"checkpoint.every": 10, "checkpoint.keep": 5}, 6),
        ({"checkpoint.every": 50}, 2),
        ({"checkpoint.every": 60, "checkpoint.last": True}, 2),
        ({"checkpoint.last": True}, 1),
        ({"checkpoint.last": False}, 0),
    ],
)
def test_as_many_checkpoints_are_counted_as_lie_on_the_disk_at_once(keys, count):
    config = tiny_config({**keys, "steps": 100})
    assert preflight.disk_need(config, tiny_plan()).num_checkpoints == count


def with_free(monkeypatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(free))


def test_a_small_disk_is_warned_of_with_need_and_have(monkeypatch):
    config, plan = tiny_config({"checkpoint.every": 1, "model.hidden": 1024}), tiny_plan({"model.hidden": 1024})
    need = preflight.disk_need(config, plan)
    with_free(monkeypatch, need.total)
    assert preflight.disk_shortage(config, plan, Path("runs")) == []
    with_free(monkeypatch, 2**26)
    (told,) = preflight.disk_shortage(config, plan, Path("runs"))
    assert f"the run needs {need.total / 2**30:.1f} GiB in runs (3 checkpoints of" in told
    assert "(2 kept while the next is written)" in told and "and 0.0625 GiB are free" in told


def test_notes_are_on_the_screen_before_the_run_directory_is_made(monkeypatch, tmp_path, capsys):
    class Made(Exception):
        pass

    def make(*_):
        raise Made

    with_free(monkeypatch, 1000)
    monkeypatch.setattr(directory, "create", make)
    keys = {**RESNET, "dataset.name": "digits", "dataset.vocab": None, "model.image": 16}
    with pytest.raises(Made):
        start.start(tiny_config({**keys, "runs": str(tmp_path)}), tiny_plan(keys), [], [])
    said = capsys.readouterr().err
    assert "note: the disk may become full: the run needs" in said
    assert "note: the images of dataset=digits have 8 x 8 pixels" in said


def test_the_disk_of_a_folder_that_is_not_there_yet_is_that_of_the_one_above(tmp_path):
    assert preflight.free_bytes(tmp_path / "a" / "b") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.01)


def test_plans_that_are_not_trained_write_no_checkpoints(monkeypatch):
    with_free(monkeypatch, 0)
    for verb in ("verify", "bench"):
        assert preflight.disk_shortage(tiny_config(verb=verb, checkpoint__every=1), tiny_plan(), Path("runs")) == []
