"""The record of attempts, and rewinding a run's rows to a checkpoint."""

from __future__ import annotations

import json

import pytest

from parallelrun.report.records import attempts
from parallelrun.report.records.attempts import Attempt


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_rewinding_moves_what_came_after_the_checkpoint(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank_1.json").write_text("{}")
    (tmp_path / "logs" / "collectives_rank_0.txt").write_text("step 1\n")
    (tmp_path / "logs" / "position_rank_1.json").write_text("{}")
    metrics = [{"step": step, "loss": 1 / step, "step_time_s": 0.5} for step in range(1, 8)]
    write_rows(tmp_path / "metrics.jsonl", metrics)
    write_rows(tmp_path / "routing.jsonl", [{"step": 5}, {"step": 6}])
    assert attempts.rewind(tmp_path, 5, 1) == 1.0
    aside = tmp_path / "attempts" / "1"
    assert rows(tmp_path / "metrics.jsonl") == metrics[:5] and rows(aside / "metrics.jsonl") == metrics[5:]
    assert rows(tmp_path / "routing.jsonl") == [{"step": 5}]
    assert (aside / "errors" / "rank_1.json").exists() and not (tmp_path / "errors").exists()
    assert (aside / "collectives_rank_0.txt").exists() and not list((tmp_path / "logs").iterdir())
    assert attempts.rewind(tmp_path, 5, 2) == 0.0  # nothing is left to remove
    assert rows(tmp_path / "metrics.jsonl") == metrics[:5]


def test_a_torn_row_and_updates_of_servers_are_removed_too(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    write_rows(metrics, [{"step": 1}, {"step": 2}])
    with open(metrics, "a") as file:
        file.write('{"step": 3, "lo')
    write_rows(tmp_path / "apply_log.jsonl", [{"version": 1, "clock": 1}])
    attempts.rewind(tmp_path, 2, 1)
    assert rows(metrics) == [{"step": 1}, {"step": 2}]
    assert not (tmp_path / "apply_log.jsonl").read_text()
    write_rows(metrics, [{"step": 1, "clock": 1}, {"step": 2, "clock": 1}])
    attempts.rewind(tmp_path, 2, 2)
    assert not metrics.read_text()


def test_the_cost_of_restarts_is_the_time_without_steps_and_the_repeated_work(tmp_path):
    history = [
        Attempt(1, 4, {"dp": 4}, began=0.0, stepping=5.0, ended=20.0, step=7, error="died: SIGKILL", rank=3, host="h",
                repeated_s=2.0),
        Attempt(2, 4, {"dp": 4}, began=20.5, stepping=23.0, resumed_step=5, step=5),
    ]  # fmt: skip
    attempts.write(tmp_path, history)
    assert attempts.read(tmp_path) == history
    assert attempts.summary(tmp_path) == {"restarts": 1, "restart_lost_s": pytest.approx(5.0), "repeated_steps": 2}
    status = attempts.status(tmp_path)
    assert status["attempt"] == 2 and status["last_failure"]["rank"] == 3
    assert attempts.lines(history, 4) == [
        "attempt 1 of 4: 4 ranks (dp=4), steps 1 to 7, ended by rank 3 on h (died: SIGKILL)",
        "attempt 2 of 4: 4 ranks (dp=4), no step",
    ]
    told = attempts.lines(history, 4, step=60)
    assert "steps 1 to 7," in told[0] and told[1] == "attempt 2 of 4: 4 ranks (dp=4), steps 6 to 60"


def test_a_run_without_attempts_says_nothing_of_them(tmp_path):
    assert attempts.read(tmp_path) == [] and attempts.summary(tmp_path) == attempts.status(tmp_path) == {}
    attempts.first_step_begins(tmp_path)
    assert not (tmp_path / attempts.FILE).exists()
    (tmp_path / attempts.FILE).write_text('{"attempts": [{"number": 1, "more": 2}]}')
    assert attempts.read(tmp_path) == []
