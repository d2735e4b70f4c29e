"""A disk that is full when a run saves: what the user is told, what is kept, and how the run ends.

The files of these runs may have 60,000 bytes each, which is enough for every record and not for a checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from parallelrun.base import reserve
from parallelrun.cli.main import main
from parallelrun.launch.host import directory as directory_module
from tests.cli.launcher import run_launcher, run_to_end

TINY = ["model=gpt", "strategy=single", "dataset=synthetic", "model.layers=1", "model.hidden=32", "model.seq=8"]
ROOM = 60_000


def run_without_room(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The run, and its directory."""
    words = (*TINY, "eval.batches=1", f"runs={folder}", *words)
    done = run_to_end(*words, cwd=folder, limit=ROOM)
    return done, (folder / "latest").resolve()


def document(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("room", "code", "said"),
    [
        ("returns", 0, "step 4: the disk has room again: 3 rows of metrics.jsonl are written"),
        ("kept back", 0, "warning: the disk is full: from step 1 on, rows of metrics.jsonl are kept in memory"),
        ("never", 3, "no room to write: [Errno 28] No space left on device"),
    ],
)
def test_rows_wait_for_room_and_status_and_message_always_come(tmp_path, room, code, said):
    overrides = {"dp": 2, "steps": 6}
    run = run_launcher(tmp_path, {"room": room}, overrides=overrides, worker="on_a_full_disk")
    assert run.wait() == code, run.stderr
    assert said in run.stdout + run.stderr
    state = "done" if code == 0 else "failed"
    assert (run.status["state"], run.status["exit_code"], run.status["step"]) == (state, code, 6)
    if code == 0:
        rows = (run.directory / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert document(run.directory / "summary.json")["steps"] == 6
    else:
        assert run.status["failed_rank"] == 0 and said in run.status["error"]
    assert not list(run.directory.glob(".reserve*"))


def test_a_disk_without_room_before_the_start_ends_with_3(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "config.yaml"))

    monkeypatch.setattr(directory_module, "write_text", full)
    monkeypatch.delenv("RANK", raising=False)
    assert main([*TINY, f"runs={tmp_path}"]) == 3
    assert "No space left on device" in capsys.readouterr().err


def test_the_room_kept_back_is_real_and_given_to_the_one_who_asks(tmp_path):
    assert reserve.set_aside(tmp_path)
    sizes = {path.name: path.stat().st_blocks * 512 for path in tmp_path.iterdir()}
    assert sizes[reserve.RECORDS] >= 2**18 and sizes[reserve.STATUS] >= 2**14 and len(sizes) == 3

    def write():
        if (tmp_path / reserve.STATUS).exists():
            raise OSError(errno.ENOSPC, "full")
        return "written"

    assert reserve.insist(tmp_path, reserve.STATUS, write) == "written"
    assert {path.name for path in tmp_path.iterdir()} == sizes.keys() - {reserve.STATUS}
    assert not reserve.set_aside(tmp_path / "nosuch")


def test_a_periodic_save_that_fails_is_said_once_and_the_training_goes_on(tmp_path):
    done, directory = run_without_room(tmp_path, "steps=5", "checkpoint.every=3", "checkpoint.last=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("warning: the checkpoint of step 3 could not be written") == 1
    assert "earlier checkpoints are untouched; training goes on" in done.stdout
    status, summary = document(directory / "status.json"), document(directory / "summary.json")
    assert (status["state"], status["step"], status["failed_save_step"]) == ("done", 5, 3)
    assert (summary["state"], summary["failed_saves"], summary["failed_save_step"]) == ("done", 1, 3)
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 5
    assert list((directory / "checkpoints").iterdir()) == []  # nothing half-written takes room


def test_the_last_save_that_fails_ends_the_run_with_3(tmp_path):
    done, directory = run_without_room(tmp_path, "steps=2", "checkpoint.last=true")
    assert done.returncode == 3, done.stdout + done.stderr
    status = document(directory / "status.json")
    assert (status["state"], status["exit_code"], status["step"], status["failed_save_step"]) == ("failed", 3, 2, 2)
    assert "the checkpoint of step 2 could not be written" in status["error"]
    summary = document(directory / "summary.json")  # what was trained is told all the same
    assert (summary["state"], summary["steps"], summary["failed_saves"]) == ("failed", 2, 1)
