"""Records of run directories: what is missing is empty, what is broken is named."""

from __future__ import annotations

import pytest

from parallelrun.base.errors import ConfigError, ParallelrunError
from parallelrun.report.records.read import read
from tests.run_files import write_run


def test_a_finished_run(tmp_path):
    run = read(write_run(tmp_path / "a", config={"optimizer.lr": 0.1}))
    assert run.state == "done" and run.config["optimizer.lr"] == 0.1 and run.plan["degrees.dp"] == 2
    assert run.manifest["versions.torch"] == "2.13.0"
    assert run.number("loss") == 2.0 and run.number("state") is None and run.number("absent") is None
    assert [row["loss"] for row in run.rows] == [5.0, 4.0, 3.0, 2.0]


def test_a_run_without_a_summary_has_the_results_of_its_steps(tmp_path):
    run = read(write_run(tmp_path / "a", state="running"))
    assert run.state == "running"
    assert (run.number("loss"), run.number("steps"), run.number("step_time_median_s")) == (2.0, 4, 0.5)


def test_a_run_that_failed_at_once_has_no_results(tmp_path):
    directory = write_run(tmp_path / "a", losses=(), state="failed")
    for name in ("plan.json", "status.json"):
        (directory / name).unlink()
    run = read(directory)
    assert (run.state, run.results, run.rows) == ("unknown", {}, ())


def test_a_torn_last_line_is_ignored(tmp_path):
    directory = write_run(tmp_path / "a")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert len(read(directory).rows) == 4


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("summary.json", "{", "summary.json"),
        ("summary.json", "[]", "summary.json"),
        ("status.json", "\x00", "status.json"),
        ("manifest.json", "nope", "manifest.json"),
        ("plan.json", "{}}", "plan.json"),
        ("config.yaml", "a: [1", "config.yaml"),
        ("config.yaml", "just text", "config.yaml"),
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl:2"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 1.0}\n', "metrics.jsonl:2: step"),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n', "metrics.jsonl:1: loss"),
        ("metrics.jsonl", "3\n{}\n", "metrics.jsonl:1: step"),
    ],
)
def test_a_broken_file_is_named_with_exit_4(tmp_path, name, text, where):
    directory = write_run(tmp_path / "a")
    (directory / name).write_text(text)
    with pytest.raises(ParallelrunError) as caught:
        read(directory)
    assert caught.value.exit_code == 4
    assert caught.value.problems[0].where == str(directory / where)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        read(tmp_path)
