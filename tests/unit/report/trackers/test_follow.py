"""What a tracker is told: every step once, also after a resume; configuration, plan, and how the run ended."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from parallelrun.report import trackers
from parallelrun.report.trackers import FAILED, FINISHED, INTERRUPTED, Tracker, follow, numbers
from tests.unit.report.trackers.run_directory import (
    begin,
    end,
    followed_to_end,
    interrupted_and_resumed,
    resumed,
    state_of,
    train,
)


class Notebook(Tracker):
    """Keeps what it is told, over all of its runs."""

    told: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, run):
        self.run = run
        self.told.append(("begin", run))

    @property
    def identity(self):
        return self.run.identity or {"id": f"id of {self.run.directory.name}"}

    def log(self, step, metrics):
        self.told.append(("log", step, metrics))

    def finish(self, state, summary):
        self.told.append(("finish", state, summary))


class Eraser(Notebook):
    """Forgets the steps that a resumed run takes again."""

    takes_back_steps = True


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Notebook, "told", [])
    monkeypatch.setattr(trackers, "tracker_class", lambda name: {"notebook": Notebook, "eraser": Eraser}[name])
    return lambda kind: [one[1:] for one in Notebook.told if one[0] == kind]


def test_a_tracker_is_told_configuration_plan_steps_and_summary(told, tmp_path):
    run = begin(
        tmp_path, "first", **{"tracker.tags": ["a"], "tracker.group": "g", "model.arguments": {"api_key": "hush"}}
    )
    followed_to_end(run, "notebook", [1, 2])
    [[found]] = told("begin")
    assert (found.name, found.project, found.group, found.tags) == ("gpt/first", "parallelrun", "g", ("a",))
    assert found.config["model"]["layers"] == 4 and found.config["steps"] == 3
    assert "hush" not in str(found.config) and found.config["model"]["arguments"] == {"api_key": "<redacted>"}
    assert found.plan["dp"] == 2 and found.plan["predicted_memory_bytes"] > 10_000
    assert told("log") == [(1, {"loss": 1.0, "lr": 0.1}), (2, {"loss": 0.5, "lr": 0.1})]
    [[state, summary]] = told("finish")
    assert state == FINISHED and summary["loss"] == 0.25 and summary["exit_code"] == 0


def test_rows_written_until_the_end_are_logged(told, tmp_path):
    run = begin(tmp_path, "first")
    end(run)

    class Ending:
        """The run's end, at its third step; each is written while the tracker waits."""

        step = 0

        def wait(self, seconds):
            self.step += 1
            train(run, [self.step])
            return self.step == 3

    follow.follow(run, "notebook", Ending())
    assert [step for step, _ in told("log")] == [1, 2, 3] and state_of(run, "notebook")["step"] == 3


def test_a_prediction_of_the_step_is_told_where_there_is_one(told, tmp_path):
    rates = {"cluster.peak_tflops": 100.0, "cluster.memory_gb_s": 1000.0, "cluster.intra_gb_s": 100.0}
    run = begin(tmp_path, "first", **rates)
    assert follow.run_of(run, follow.state_before(run, "notebook")).plan["predicted_step_time_s"] > 0
    other = begin(tmp_path, "other")
    assert follow.run_of(other, follow.state_before(other, "notebook")).plan["predicted_step_time_s"] is None


def test_a_resumed_run_goes_on_as_the_same_one_and_logs_no_step_twice(told, tmp_path):
    first, second = interrupted_and_resumed(tmp_path, "notebook")
    assert [step for step, _ in told("log")] == [1, 2, 3, 4, 5, 6, 7, 8]
    before, after = [run for [run] in told("begin")]
    assert (before.identity, before.resumed_step) == (None, 0)
    assert (after.identity, after.resumed_step) == ({"id": "id of first"}, 3)
    assert before.name == after.name == "gpt/first"
    assert [state for state, _ in told("finish")] == [FAILED, FINISHED]
    assert state_of(first, "notebook")["step"] == state_of(second, "notebook")["step"] == 8


def test_a_tracker_that_forgets_later_steps_gets_them_again(told, tmp_path):
    first = followed_to_end(begin(tmp_path, "first"), "eraser", range(1, 6), "failed", 6)
    Notebook.told.clear()
    second = begin(tmp_path, "second")
    follow.state.carry_over(first, second, ["eraser"], 3)
    followed_to_end(second, "eraser", range(4, 9))
    assert [step for step, _ in told("log")] == [4, 5, 6, 7, 8]


def test_the_first_run_resumed_again_knows_the_steps_of_both(told, tmp_path):
    first, _ = interrupted_and_resumed(tmp_path, "notebook")
    Notebook.told.clear()
    third = resumed(first, "third", 3)  # a second continuation of the same checkpoint, after step 8 was logged
    followed_to_end(third, "notebook", range(4, 11))
    assert [step for step, _ in told("log")] == [9, 10]


def test_a_run_whose_first_directory_was_removed_still_goes_on(told, tmp_path):
    first, second = interrupted_and_resumed(tmp_path, "notebook")
    (first / "trackers" / "notebook.json").unlink()
    (first / "trackers").rmdir()
    third = resumed(second, "third", 8)
    Notebook.told.clear()
    followed_to_end(third, "notebook", [9])
    assert [step for step, _ in told("log")] == [9] and told("begin")[0][0].identity == {"id": "id of first"}


@pytest.mark.parametrize("key", ["tracker.name", "tracker.project", "tracker.group"])
def test_another_name_project_or_group_is_another_run(told, tmp_path, key):
    first = followed_to_end(begin(tmp_path, "first"), "notebook", range(1, 6))
    Notebook.told.clear()
    followed_to_end(resumed(first, "second", 3, **{key: "other"}), "notebook", range(4, 9))
    assert told("begin")[0][0].identity is None
    assert [step for step, _ in told("log")] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [("done", 0, FINISHED), ("failed", 5, FAILED), ("preempted", 75, INTERRUPTED), ("interrupted", 130, INTERRUPTED),
     ("interrupted", 143, INTERRUPTED), ("failed", 7, FAILED)],
)  # fmt: skip
def test_the_end_of_a_run(tmp_path, state, code, expected):
    run = begin(tmp_path, "first")
    end(run, state, code, "why")
    ended, summary = follow.end_of(run)
    assert ended == expected and (summary["exit_code"], summary["error"]) == (code, "why")


def test_a_run_whose_launcher_was_killed_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "STATUS_S", 0.1)
    run = begin(tmp_path, "first")
    end(run, "running", 0)
    state, summary = follow.end_of(run)
    assert state == FAILED and "launcher" in summary["error"]


def test_rows_are_read_once_they_are_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = follow.RowTail(path)
    assert list(tail.rows()) == []
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert list(tail.rows()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ss": 3.0}\n')
    assert list(tail.rows()) == [{"step": 2, "loss": 3.0}] and list(tail.rows()) == []


def test_rows_beyond_a_part_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_MOST_BYTES", 30)  # two rows and a half
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 8)))
    assert [row["step"] for row in follow.RowTail(path).rows()] == list(range(1, 8))


def test_only_numbers_are_metrics():
    row = {"schema": 1, "step": 3, "loss": 2.5, "tokens": 4, "skipped": True, "grad_norm": None, "loads": [1], "x": "y"}
    assert numbers(row) == {"loss": 2.5, "tokens": 4}
