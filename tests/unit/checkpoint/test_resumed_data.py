"""Going on from a checkpoint with other data than it was trained on: refused, or allowed, said and recorded."""

from __future__ import annotations

import json

import pytest

from parallelrun.base.errors import CheckpointError
from parallelrun.launch.entry.start import start
from parallelrun.planner.model.definitions import Dataset
from tests.checkpoints import written
from tests.plans import tiny_config, tiny_plan

NEW, OLD = "a" * 64, "b" * 64
SETTINGS = {"seed": 1234, "dataset.val_fraction": 0.05, "dataset.pack": False, "dataset.max_bytes": None}
SAME = {"name": "text", "fingerprint": NEW, "settings": SETTINGS}


@pytest.fixture
def trained_on(tmp_path, monkeypatch):
    """Start a run that goes on from a checkpoint whose data had a given record; its manifest."""
    opened = Dataset("text", 32, NEW, None, None, settings=SETTINGS)
    monkeypatch.setattr("parallelrun.launch.entry.start.open_dataset", lambda *_: opened)
    monkeypatch.setattr("parallelrun.launch.entry.start._inline", lambda *_: 1 / 0)

    def go_on(dataset, changes=False, **extra) -> dict:
        extra |= {"dataset": dataset} if dataset else {}
        path = written(tmp_path / "old" / "checkpoints" / "step_3", tiny_plan(), **extra)
        keys = {"resume": str(path), "runs": str(tmp_path / "runs"), "dataset.name": "text", "steps": 9}
        with pytest.raises(ZeroDivisionError):
            start(tiny_config(keys | {"checkpoint.change_data": changes}), tiny_plan(), [], [])
        return json.loads((tmp_path / "runs" / "latest" / "manifest.json").read_text())["resumed"]

    return go_on


@pytest.mark.parametrize(
    "dataset, said",
    [
        (SAME | {"settings": SETTINGS | {"seed": 5}}, [("seed is 1234, and was 5", "seed", "seed=5")]),
        (
            SAME | {"settings": SETTINGS | {"dataset.val_fraction": 0.5, "dataset.pack": True}},
            [
                ("dataset.val_fraction is 0.05, and was 0.5", "dataset.val_fraction", "dataset.val_fraction=0.5"),
                ("dataset.pack is false, and was true", "dataset.pack", "dataset.pack=true"),
            ],
        ),
        (
            SAME | {"settings": SETTINGS | {"dataset.max_bytes": 7}},
            [("dataset.max_bytes is null, and was 7", "dataset.max_bytes", "dataset.max_bytes=7")],
        ),
        (SAME | {"settings": SETTINGS | {"corpus": "x"}}, [("corpus is null, and was x", "corpus", "corpus=x")]),
        (
            SAME | {"name": "pystdlib"},
            [("dataset.name is text, and was pystdlib", "dataset.name", "dataset.name=pystdlib")],
        ),
        (
            SAME | {"fingerprint": OLD},
            [(f"the data have sha256 {NEW}, and had {OLD}", "dataset", "the data as they were")],
        ),
    ],
)
def test_other_data_are_refused_with_both_values_and_no_run_is_made(trained_on, tmp_path, dataset, said):
    with pytest.raises(CheckpointError) as caught:
        trained_on(dataset)
    problems = caught.value.problems
    assert caught.value.exit_code == 4 and not (tmp_path / "runs").exists()
    assert [(one.what.partition(": ")[0], one.where, one.suggestion) for one in problems] == said
    path = tmp_path / "old" / "checkpoints" / "step_3"
    assert all(str(path) in one.what for one in problems)
    assert "checkpoint.change_data=true" in problems[-1].command and f"init.from={path}" in problems[-1].command


def test_other_data_that_are_allowed_are_said_with_both_values_and_recorded(trained_on, capsys):
    resumed = trained_on({"name": "text", "fingerprint": OLD, "settings": SETTINGS}, changes=True)
    assert (resumed["step"], resumed["dataset"], resumed["dataset_sha256"]) == (3, "text", OLD)
    assert resumed["dataset_changed"] is True
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "DATA SET HAS CHANGED" in line]
    assert line.startswith("warning: ") and OLD in line and NEW in line


def test_what_is_started_and_read_is_said_before_it_is_read(capsys, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "parallelrun.launch.entry.start.open_dataset", lambda *_: said.append(capsys.readouterr().err) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        start(tiny_config({"dataset.name": "text"}), tiny_plan(), [], [])
    assert said[0].splitlines()[-1] == "starting 1 rank, loading data (text)"


@pytest.mark.parametrize("changes", [False, True])
def test_nothing_is_said_of_the_same_data(trained_on, capsys, changes):
    assert trained_on(SAME, changes)["dataset_changed"] is False
    said = capsys.readouterr().err
    assert "DATA SET" not in said and "warning" not in said


@pytest.mark.parametrize("dataset", [{"name": "text", "fingerprint": NEW}, None], ids=["older", "not_recorded"])
def test_an_older_checkpoint_resumes_and_says_what_is_not_compared(trained_on, capsys, dataset):
    assert trained_on(dataset, seed=1234)["dataset_changed"] is False
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "did not record dataset.max_bytes, dataset.pack, dataset.val_fraction: they are not compared" in line


def test_what_an_older_checkpoint_records_is_compared(trained_on):
    with pytest.raises(CheckpointError, match="seed is 1234, and was 5"):
        trained_on({"name": "text", "fingerprint": NEW}, seed=5)
