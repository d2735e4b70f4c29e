"""One row per run: states of runs that live, died or are broken, from two small files."""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime, timezone

import pytest

from parallelrun.base.records import write_json
from parallelrun.report.records import find, rows
from parallelrun.report.records.rows import last_row, read_row
from tests.run_files import write_run

NO_PROCESS = 2**22 + 1  # above the largest pid of Linux


def status(directory, **fields) -> None:
    write_json(directory / "status.json", {"state": "running", "step": 2, "host": socket.gethostname(), **fields})


def test_a_finished_run(tmp_path):
    row = read_row(write_run(tmp_path / "gpt-ddp-dp2" / "20260101T000000Z-aaaaaa"))
    assert (row.state, row.step, row.name, row.id) == ("done", 4, "gpt-ddp-dp2", "aaaaaa")
    assert row.results["val_loss"] == 3.0


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"pid": os.getpid()}, "running"),
        ({"pid": NO_PROCESS}, "died"),
        ({"pid": NO_PROCESS, "host": "elsewhere"}, "running"),
        ({"pid": None}, "running"),
        ({"pid": NO_PROCESS, "state": "failed", "error": "boom"}, "failed"),
    ],
)
def test_a_run_without_a_summary_lives_or_died(tmp_path, fields, state):
    directory = write_run(tmp_path / "a", state="running")
    status(directory, **fields)
    row = read_row(directory)
    assert (row.state, row.step, row.results["loss"]) == (state, 4, 2.0)
    assert row.error == fields.get("error", "")


@pytest.mark.parametrize(("host", "quiet_s", "state"), [
    ("elsewhere", 150, "running"),
    ("elsewhere", 170, "silent"),  # timeout_s and two minutes
    (socket.gethostname(), 170, "silent"),  # another process has the launcher's number by now
])  # fmt: skip
def test_a_run_of_which_nothing_is_heard_for_longer_than_a_hang_lasts_is_silent(tmp_path, host, quiet_s, state):
    directory = write_run(tmp_path / "a", config={"timeout_s": 40.0}, state="running")
    then = time.time() - quiet_s
    status(directory, pid=os.getpid(), host=host, updated_utc=datetime.fromtimestamp(then, timezone.utc).isoformat())
    assert read_row(directory).state == "running"  # the clock of the other host is wrong
    os.utime(directory / "status.json", (then, then))
    row = read_row(directory)
    assert row.state == state
    assert row.error.startswith("no news for 170 s: all of it was killed at once" if state == "silent" else "")


def test_a_directory_without_status_is_about_to_start_unless_it_is_old(tmp_path):
    directory = write_run(tmp_path / "a", losses=(), state="running")
    (directory / "status.json").unlink()
    assert read_row(directory).state == "starting"
    os.utime(directory, (0, 0))
    assert read_row(directory).state == "broken"
    (directory / "config.yaml").unlink()
    os.utime(directory, (0, 0))
    assert read_row(directory).state == rows.EMPTY


def test_a_broken_file_is_the_rows_state(tmp_path):
    directory = write_run(tmp_path / "a")
    (directory / "summary.json").write_text("{")
    row = read_row(directory)
    assert row.state == "broken" and "summary.json" in row.error


def test_the_last_row_is_read_from_the_end_without_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5000)) + '{"step": 5')
    assert last_row(path) == {"step": 4999}
    assert last_row(tmp_path / "missing") == {}


def test_the_id_of_a_row_finds_its_run(tmp_path):
    write_run(tmp_path / "gpt" / "20260101T000000Z-aaaaaa")
    for sweep in ("dddddd", "eeeeee"):
        write_run(tmp_path / f"sweep-20260401T000000Z-{sweep}" / "000-ddp-dp2")
    ids = [read_row(directory).id for directory in find.all_runs(tmp_path)]
    assert ids == ["eeeeee/000-ddp-dp2", "dddddd/000-ddp-dp2", "aaaaaa"]
    assert [find.resolve([one], tmp_path) for one in ids] == [[path] for path in find.all_runs(tmp_path)]
