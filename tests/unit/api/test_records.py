"""`load`, `runs`, `compare`, `sweep` and their tables, on run directories that were written for the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import parallelrun as pr
from parallelrun.api import launching
from parallelrun.api.tables import notebook_table
from tests.extras import needs
from tests.run_files import LOSSES, write_run

FIRST, SECOND = "20260101T000000Z-aaa111", "20260102T000000Z-bbb222"


@pytest.fixture
def folder(tmp_path) -> Path:
    write_run(tmp_path / "gpt-ddp" / FIRST)
    write_run(tmp_path / "gpt-ddp" / SECOND, (5.0, 4.5, 3.5, 2.5), config={"optimizer.lr": 0.1}, val_loss=3.3)
    write_run(tmp_path / "gpt-tp" / "20260103T000000Z-ccc333", (5.0,), state="failed")
    return tmp_path


def test_load(folder):
    run = pr.load("aaa111", runs=folder)
    assert (run.directory.name, run.state, run.summary["val_loss"]) == (FIRST, "done", 3.0)
    assert run.metrics.column("loss") == list(LOSSES) and len(run.metrics) == 4
    assert run.metrics[1]["step"] == 2 and [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert pr.load(run) == run and "aaa111" in run._repr_html_()
    with pytest.raises(pr.CheckpointError, match="no complete checkpoint"):
        _ = run.model
    with pytest.raises(pr.CheckpointError, match="no checkpoint step_3; there are none"):
        pr.load("aaa111", step=3, runs=folder)
    with pytest.raises(pr.ConfigError, match="no run nosuch"):
        pr.load("nosuch", runs=folder)


def test_runs(folder):
    table = pr.runs(folder)
    assert [row.id for row in table] == ["ccc333", "bbb222", "aaa111"]
    assert [row.id for row in pr.runs(folder, state="done", limit=1)] == ["bbb222"]
    assert table.rows()[1]["val_loss"] == 3.3
    assert len(pr.runs(folder / "nosuch")) == 0


def test_compare(folder):
    found = pr.compare("aaa111", "bbb222", runs=folder)
    assert [row.key for row in found.config] == ["optimizer.lr"] and found.losses[0].first_step == 2
    assert found.failures("val_loss>+1%", "loss>9") == ["val_loss>+1%: val_loss of B is 3.3, +10.000% from A's 3"]
    rows = {row["result"]: row for row in found.rows()}
    assert (rows["val_loss"]["A"], rows["val_loss"]["B"]) == (3.0, 3.3)
    assert "optimizer.lr" in found.markdown()
    assert len(repr(found)) < 400 and str(found) == found.markdown() and repr(pr.runs(folder)) == "RunTable(3 rows)"
    with pytest.raises(pr.ConfigError, match="two different runs"):
        pr.compare("aaa111", pr.load("aaa111", runs=folder), runs=folder)


def test_a_sweep_goes_on_after_points_that_are_refused_or_fail(folder, monkeypatch):
    started = []

    def carry_out(composed, words, run_root, show):
        started.append(words)
        if composed.config.optimizer.lr == 9:
            raise pr.RunFailed("diverged", exit_code=5, directory=folder / "gpt-ddp" / SECOND)
        return folder / "gpt-ddp" / FIRST

    monkeypatch.setattr(launching, "carry_out", carry_out)
    points = ["strategy=ddp dp=2", ["strategy=tp", "tp=3"], "optimizer.lr=9"]
    found = pr.sweep(points, "model=gpt", "dataset=synthetic")
    assert [point.state for point in found] == ["done", "skipped", "failed"]
    assert started == [("run", "model=gpt", "dataset=synthetic", *words) for words in
                       (("strategy=ddp", "dp=2"), ("optimizer.lr=9",))]  # fmt: skip
    assert "tp=3" in found[1].reason and found[2].reason == "diverged" and found[2].run.directory.name == SECOND
    assert found.column("val_loss") == [3.0, None, 3.3] and found.column("strategy") == ["ddp", "tp", None]


@needs("pandas")
def test_tables_become_data_frames(folder):
    frame = pr.load("aaa111", runs=folder).metrics.to_pandas()
    assert list(frame["loss"]) == list(LOSSES)
    assert list(pr.runs(folder).to_pandas()["run"]) == ["ccc333", "bbb222", "aaa111"]
    assert "val_loss" in set(pr.compare("aaa111", "bbb222", runs=folder).to_pandas()["result"])


def test_without_pandas_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pr.EnvironmentProblem) as raised:
        pr.load("aaa111", runs=folder).metrics.to_pandas()
    assert raised.value.problems[0].command == "pip install 'parallelrun[notebook]'"


@needs("pandas")
def test_a_notebook_shows_tables_as_pandas_does(folder, monkeypatch):
    table = pr.runs(folder)
    assert "<th>state</th>" in table._repr_html_() and "bbb222" in table._repr_html_()
    assert "val_loss" in pr.compare("aaa111", "bbb222", runs=folder)._repr_html_()
    assert "&lt;b&gt;" in notebook_table([{"a": "<b>"}])
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert table._repr_html_() is None, "the notebook shows the repr"
