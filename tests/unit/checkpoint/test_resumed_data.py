"""Going on from a checkpoint with other data than it was trained on: said loudly and recorded, never refused."""

from __future__ import annotations

import json

import pytest

from parallelrun.launch.start import start
from tests.checkpoints import written
from tests.plans import tiny_config, tiny_plan

NEW, OLD = "a" * 64, "b" * 64


@pytest.fixture
def trained_on(tmp_path, monkeypatch):
    """Start a run that goes on from a checkpoint whose data had a given sha256; what it says and its manifest."""
    monkeypatch.setattr("parallelrun.launch.start.open_dataset", lambda *_: type("Data", (), {"fingerprint": NEW}))
    monkeypatch.setattr("parallelrun.launch.start._inline", lambda *_: 1 / 0)

    def go_on(dataset) -> dict:
        extra = {"dataset": dataset} if dataset else {}
        path = written(tmp_path / "old" / "checkpoints" / "step_3", tiny_plan(), **extra)
        changes = {"resume": str(path), "runs": str(tmp_path / "runs"), "dataset.name": "text", "steps": 9}
        with pytest.raises(ZeroDivisionError):
            start(tiny_config(changes), tiny_plan(), [], [])
        return json.loads((tmp_path / "runs" / "latest" / "manifest.json").read_text())["resumed"]

    return go_on


def test_other_data_is_said_with_both_hashes_and_recorded(trained_on, capsys):
    resumed = trained_on({"name": "pystdlib", "fingerprint": OLD})
    assert (resumed["step"], resumed["dataset"], resumed["dataset_sha256"]) == (3, "pystdlib", OLD)
    assert resumed["dataset_changed"] is True
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "DATA SET HAS CHANGED" in line]
    assert line.startswith("warning: ") and f"pystdlib, sha256 {OLD}" in line and f"text, sha256 {NEW}" in line


def test_what_is_started_and_read_is_said_before_it_is_read(capsys, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(
        "parallelrun.launch.start.open_dataset", lambda *_: said.append(capsys.readouterr().err) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        start(tiny_config({"dataset.name": "text"}), tiny_plan(), [], [])
    assert said[0].splitlines()[-1] == "starting 1 rank, loading data (text)"


@pytest.mark.parametrize("dataset", [{"name": "text", "fingerprint": NEW}, None], ids=["the_same", "not_recorded"])
def test_nothing_is_said_of_the_same_data_or_of_data_nobody_knows(trained_on, capsys, dataset):
    assert trained_on(dataset)["dataset_changed"] is False
    assert "DATA SET" not in capsys.readouterr().err
