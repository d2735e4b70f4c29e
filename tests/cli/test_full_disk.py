"""A disk that is full when a run saves: what the user is told, what is kept, and how the run ends.

The files of these runs may have 60,000 bytes each, which is enough for every record and not for a checkpoint.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

TINY = ["model=gpt", "strategy=single", "dataset=synthetic", "model.layers=1", "model.hidden=32", "model.seq=8"]
ROOM = 60_000


def run_without_room(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The run, and its directory."""
    command = [sys.executable, "-m", "parallelrun", *TINY, "eval.batches=1", f"runs={folder}", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))

    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, preexec_fn=limit)
    return done, (folder / "latest").resolve()


def document(path: Path) -> dict:
    return json.loads(path.read_text())


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
