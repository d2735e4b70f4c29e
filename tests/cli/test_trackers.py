"""Trackers as a user chooses them: several at once, resumed, in a sweep, a plug-in's beside ours, and misspelt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.launcher import run_to_end
from tests.cli.test_plugin import install

SMALL = (
    "model=gpt", "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq=8", "dataset=synthetic",
    "global_batch=4", "eval.every=0", "tracker.timeout_s=100",
)  # fmt: skip


SLOW = """
import os, time
from demo_plugin.diary import Diary

class TRACKER(Diary):
    def write(self, **line):
        time.sleep(0.5)
        with open("slow.txt", "a") as file:
            file.write(f"{os.getpid()}\\n")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The plug-in of tests/plugin, and a tracker whose every call takes half a second."""
    folder = install(tmp_path_factory.mktemp("site"))
    (folder / "slow_tracker.py").write_text(SLOW)
    info = folder / "slow_tracker-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[parallelrun.trackers]\nslow = slow_tracker")
    return folder


def diaries(folder: Path) -> dict[str, list[dict]]:
    """What `tracker=diary` has written, by run directory."""
    paths = sorted(folder.glob("runs/*/*/diary.jsonl"))
    return {str(path.parent): [json.loads(line) for line in path.read_text().splitlines()] for path in paths}


def test_two_trackers_follow_a_run_and_its_resumption_as_one(site, tmp_path):
    words = (*SMALL, "strategy=single", "steps=3", "tracker=[tensorboard,diary,slow]", "tracker.name=mine")
    first = run_to_end(*words, cwd=tmp_path, site=site)
    assert first.returncode == 0 and "warning" not in first.stderr, first.stderr
    again = run_to_end("resume=latest", "steps=5", cwd=tmp_path, site=site)
    assert again.returncode == 0 and "warning" not in again.stderr, again.stderr
    [(directory, lines)] = diaries(tmp_path).items()
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5]
    assert [line["began"] for line in lines if "began" in line] == ["mine", "mine"]
    assert [line["ended"] for line in lines if "ended" in line] == ["finished", "finished"]
    rows = [json.loads(line) for path in tmp_path.glob("runs/*/*/metrics.jsonl") for line in path.open()]
    assert {row["step"]: row["loss"] for row in rows} == {row["step"]: row["loss"] for row in lines if "step" in row}
    assert lines[-1]["loss"] == lines[-2]["loss"]  # the summary's
    assert [str(path.parent) for path in tmp_path.glob("runs/*/*/tensorboard")] == [directory]
    assert not list(tmp_path.glob("runs/*/*/status.prom"))
    calls = (tmp_path / "slow.txt").read_text().split()
    assert len(calls) == 2 + 3 + 2 + 2  # begin, steps, end, of two runs
    assert len({*calls}) == 2 and min(row["step_time_s"] for row in rows) < 0.12  # each call takes 0.5 s


def test_a_sweep_gives_each_point_its_own_run_in_a_common_group(site, tmp_path):
    words = ("-m", *SMALL, "strategy=single", "seed=1,2", "steps=2", "tracker=diary")
    done = run_to_end(*words, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
    found = diaries(tmp_path)
    assert len(found) == 2
    [sweep] = {Path(directory).parent.name for directory in found}
    for directory, lines in found.items():
        assert (lines[0]["began"], lines[0]["group"]) == (f"{sweep}/{Path(directory).name}", sweep)
        assert [line["step"] for line in lines if "step" in line] == [1, 2] and lines[-1]["ended"] == "finished"


def test_trackers_are_listed_and_misspelt_ones_refused_before_anything_starts(site, tmp_path):
    listed = run_to_end("ls", "trackers", "--json", cwd=tmp_path, site=site)
    rows = {row["name"]: row["source"] for row in json.loads(listed.stdout)["trackers"]}
    assert rows == {"tensorboard": "built-in", "wandb": "built-in", "mlflow": "built-in", "diary": "plugin",
                    "slow": "plugin"}  # fmt: skip
    for word, near in (("tracker=dairy", "tracker=diary"), ("tracker=[wandb,mlfow]", "tracker=mlflow")):
        refused = run_to_end(word, cwd=tmp_path, site=site)
        assert refused.returncode == 2 and f"did you mean: {near}" in refused.stderr, refused.stderr
    assert not (tmp_path / "runs").exists()


def test_resuming_a_run_that_still_trains_says_which_process_writes_it(site, tmp_path):
    words = (*SMALL, "strategy=single", "steps=3", "tracker=diary")
    assert run_to_end(*words, cwd=tmp_path, site=site).returncode == 0
    [(directory, lines)] = diaries(tmp_path).items()
    file = Path(directory, "status.json")
    status = json.loads(file.read_text())
    assert "still trains" not in run_to_end("resume=latest", "steps=4", cwd=tmp_path, site=site).stderr
    lines = diaries(tmp_path)[directory]
    file.write_text(json.dumps({**status, "state": "running", "pid": os.getpid()}))
    second = run_to_end(f"resume={directory}", "steps=5", *SMALL, "tracker=diary", cwd=tmp_path, site=site)
    assert second.returncode == 0, second.stderr
    assert f"warning: {directory} still trains: process {os.getpid()} on {status['host']} writes it" in second.stderr
    records = diaries(tmp_path)
    assert records.pop(directory) == lines and len(records) == 1
