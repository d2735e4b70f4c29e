"""`runs gc`: what is removable, that nothing else is touched, and never what trains."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time

import pytest

from parallelrun.base.records import write_json
from parallelrun.launch.failures import cleanup
from parallelrun.launch.failures.cleanup import Policy, removable, remove
from parallelrun.report.sweeps import sweep_rows
from tests.run_files import write_run

NO_PROCESS = 2**22 + 1
DAY = 86400.0


def save(directory, *steps: int):
    """Checkpoints that count as complete, of 100 bytes times the step."""
    for step in steps:
        (directory / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (directory / "checkpoints" / f"step_{step}" / "data").write_bytes(bytes(100 * step))
    return directory


@pytest.fixture(autouse=True)
def every_checkpoint_is_complete(monkeypatch):
    monkeypatch.setattr("parallelrun.checkpoint.find.open_complete", lambda path: None)


@pytest.fixture
def runs(tmp_path):
    """A folder of runs in every state, all a day old but for those that live."""

    def of(end: str, **options):
        return write_run(tmp_path / "gpt" / f"20260101T000000Z-{end}", **options)

    save(of("aaaaaa"), 2, 4, 6)  # done; keeps 2
    of("bbbbbb", state="failed")
    save(of("cccccc", state="failed"), 2)  # can be resumed
    died = of("dddddd", state="running")
    write_json(died / "status.json", {"state": "running", "pid": NO_PROCESS, "host": socket.gethostname()})
    of("eeeeee", state="preempted")
    (of("ffffff") / "summary.json").write_text("{")  # broken
    (tmp_path / "gpt" / "20260101T000000Z-123456").mkdir()  # not a run: no file of ours
    (tmp_path / "gpt" / "notes").mkdir()
    for parent, _, names in os.walk(tmp_path):
        for name in [*names, "."]:
            os.utime(os.path.join(parent, name), (time.time() - DAY, time.time() - DAY))
    live = save(of("999999", state="running"), 1, 2, 3, 4)
    write_json(live / "status.json", {"state": "running", "pid": os.getpid(), "host": socket.gethostname()})
    return tmp_path


def names(found) -> list[tuple[str, int]]:
    return sorted((one.run.name[-6:], one.keep) for one in found)


def test_failed_runs_and_checkpoints_beyond_keep_are_removable(runs):
    found = removable(runs, Policy())
    assert names(found) == [("aaaaaa", 2), ("bbbbbb", 0), ("dddddd", 0), ("ffffff", 0)]
    (checkpoints,) = [one for one in found if one.keep]
    assert (checkpoints.num_bytes, checkpoints.reason) == (200, "1 checkpoint beyond the newest 2")
    assert names(removable(runs, Policy(failed=False))) == [("aaaaaa", 2)]
    assert names(removable(runs, Policy(failed=False, keep=1))) == [("aaaaaa", 1)]


def test_old_runs_are_removable_in_any_state_but_running(runs):
    ended = ["aaaaaa", "bbbbbb", "cccccc", "dddddd", "eeeeee", "ffffff"]
    assert names(removable(runs, Policy(older_than_s=DAY / 2))) == [(one, 0) for one in ended]
    assert names(removable(runs, Policy(failed=False, older_than_s=2 * DAY, keep=9))) == []


def test_nothing_is_deleted_until_asked(runs):
    def files() -> list[str]:
        return sorted(str(path) for path in runs.rglob("*"))

    before = files()
    removable(runs, Policy(older_than_s=0.0, keep=1))
    assert files() == before


def test_what_is_listed_is_removed_and_nothing_else(runs):
    removed = [*remove(runs, removable(runs, Policy()))]
    assert sum(one.num_bytes for one in removed if one.keep) == 200
    left = {path.name.rpartition("-")[2] for path in (runs / "gpt").iterdir()}
    assert left == {"notes", "123456", "999999", "aaaaaa", "cccccc", "eeeeee"}
    assert sorted(os.listdir(runs / "gpt" / "20260101T000000Z-aaaaaa" / "checkpoints")) == ["step_4", "step_6"]
    assert len(os.listdir(runs / "gpt" / "20260101T000000Z-999999" / "checkpoints")) == 4
    assert removable(runs, Policy()) == []


def test_a_run_that_begins_to_train_before_its_removal_is_left(runs):
    found = removable(runs, Policy(older_than_s=0.0))
    run = runs / "gpt" / "20260101T000000Z-aaaaaa"
    write_json(run / "status.json", {"state": "running", "pid": os.getpid(), "host": socket.gethostname()})
    assert "aaaaaa" not in [one.run.name[-6:] for one in remove(runs, found)]
    assert (run / "checkpoints" / "step_2").is_dir()


def test_a_run_that_seems_to_have_died_just_now_is_left(runs):
    run = runs / "gpt" / "20260101T000000Z-dddddd"
    os.utime(run / "status.json")
    assert "dddddd" not in [end for end, _ in names(removable(runs, Policy(older_than_s=0.0)))]


def test_the_checkpoint_that_a_live_run_resumes_from_is_kept(runs):
    source = runs / "gpt" / "20260101T000000Z-aaaaaa" / "checkpoints" / "step_6"
    live = runs / "gpt" / "20260101T000000Z-999999"
    write_json(live / "manifest.json", {"resumed": {"checkpoint": str(source)}})
    assert "aaaaaa" not in [end for end, _ in names(removable(runs, Policy(older_than_s=0.0)))]


def test_links_are_not_followed(runs, tmp_path_factory):
    outside = write_run(tmp_path_factory.mktemp("outside") / "20260101T000000Z-777777", state="failed")
    os.utime(outside / "status.json", (0, 0))
    (runs / "linked").symlink_to(outside.parent)
    (runs / "latest").symlink_to("gpt/20260101T000000Z-bbbbbb")
    assert [*remove(runs, removable(runs, Policy()))]
    assert outside.is_dir() and not (runs / "latest").is_symlink()


@pytest.fixture
def sweep(tmp_path):
    """Two points that ran, one that repeats the first, one that was not legal; the first run is old."""
    directory = tmp_path / "sweep-20260101T000000Z-abcdef"
    for name, days in (("000-gpt-one", 9), ("001-gpt-dp2", 0)):
        run = write_run(directory / name)
        for file in ("status.json", "config.yaml"):
            os.utime(run / file, (time.time() - days * DAY,) * 2)
    rows = [{"state": "done", "directory": "000-gpt-one"}, {"state": "done", "directory": "001-gpt-dp2"},
            {"state": "skipped", "same_as": 0}, {"state": "skipped", "reason": "illegal"}]  # fmt: skip
    for point, row in enumerate(rows):
        sweep_rows.append(directory, {"point": point, "invocation": 1, "config_sha256": str(point), **row})
    return directory


def test_a_sweep_forgets_the_points_that_are_removed(sweep):
    assert len([*remove(sweep.parent, removable(sweep.parent, Policy(older_than_s=DAY)))]) == 1
    assert [row["point"] for row in sweep_rows.read(sweep)] == [1, 3]
    assert (sweep / "results.csv").read_text().splitlines()[1].startswith("1,done")


def test_a_sweep_without_points_is_removed(sweep):
    (sweep / "results.csv").touch()
    assert len([*remove(sweep.parent, removable(sweep.parent, Policy(older_than_s=-1.0)))]) == 2
    assert not sweep.exists()


def test_a_row_is_appended_to_the_file_that_is_held(sweep, monkeypatch):
    """The appender has opened the file when another replaces it: it must hold the new one, or a third who forgets rows
    may replace that while the row comes in."""
    lock, append, held, opened = fcntl.flock, sweep_rows.append_jsonl, [], []

    def flock(file, operation):
        if not opened:  # by the appender, before it holds the file
            opened.append(file)
            sweep_rows.forget(sweep, {"000-gpt-one"})
        lock(file, operation)

    def appended(path, row):
        with open(path) as file, contextlib.suppress(BlockingIOError):
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.append("nobody held it")
        append(path, row)

    monkeypatch.setattr(sweep_rows.fcntl, "flock", flock)
    monkeypatch.setattr(sweep_rows, "append_jsonl", appended)
    sweep_rows.append(sweep, {"point": 9, "invocation": 1, "config_sha256": "9", "state": "done"})
    assert not held and [row["point"] for row in sweep_rows.read(sweep)] == [1, 3, 9]


def test_a_removal_that_fails_leaves_no_half_of_a_run(runs, monkeypatch):
    def fails(path):
        raise OSError(5, "broken disk", str(path))

    monkeypatch.setattr(cleanup.shutil, "rmtree", fails)
    with pytest.raises(OSError):
        [*remove(runs, removable(runs, Policy()))]
    visible = [path for path in (runs / "gpt").iterdir() if not path.name.startswith(".") and path.name != "notes"]
    assert all((path / "config.yaml").exists() for path in visible if not path.name.endswith("123456"))
