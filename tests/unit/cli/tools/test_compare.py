"""`parallelrun compare`: one document, Markdown or tables, and the exit codes."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from parallelrun.base.records import write_json
from parallelrun.cli.main import main
from parallelrun.report.records.read import read
from parallelrun.report.records.run_differences import compare
from parallelrun.report.runs import run_comparison as report
from tests.run_files import write_run


@pytest.fixture
def two(tmp_path):
    a = write_run(tmp_path / "gpt" / "20260101T000000Z-aaaaaa")
    b = write_run(tmp_path / "gpt" / "20260101T000000Z-bbbbbb", (5.0, 4.5, 3.0, 2.0), config={"dp": 4}, val_loss=3.3)
    return ["compare", str(a), str(b)]


def test_json_is_one_document(two, capsys):
    assert main([*two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["config"] == {"dp": {"A": 2, "B": 4}}
    assert found["measures"]["val_loss"]["changes"]["B"] == pytest.approx(0.1)
    assert found["losses"][0]["first_step"] == 2 and found["columns"][1]["directories"] == [two[2]]


def test_a_failed_condition_is_exit_4_and_the_comparison_is_printed(two, capsys):
    assert main([*two, "--json", "--fail-on", "val_loss>+1%", "--fail-on", "loss>+1%"]) == 4
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["failed"]) == 1
    assert printed.err.startswith("error: val_loss>+1%: val_loss of B is 3.3")
    assert main([*two, "--fail-on", "val_loss>+20%"]) == 0


def test_markdown_has_the_differences_and_results(two, capsys):
    assert main([*two, "--md"]) == 0
    text = capsys.readouterr().out
    assert "| dp | 2 | 4 |" in text and "| validation loss | 3 | 3.3 (+10.0%) |" in text
    assert "part at step 2, by +0.5 (relative +1.2e-01)" in text


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["one"], 2, "no run one"),
        (["--fail-on", "x"], 2, "not a condition"),
        (["--fail-on", "val_los>1"], 2, "val_loss"),
    ],
)
def test_mistakes_are_named(two, capsys, words, code, told):
    assert main([*two, *words]) == code
    assert told in capsys.readouterr().err


def test_one_run_is_not_compared(two, capsys):
    assert main(two[:2]) == 2
    assert main([*two[:2], two[1]]) == 2
    assert "two runs at least, got 1" in capsys.readouterr().err


def test_a_broken_file_is_exit_4_with_its_name(two, tmp_path, capsys):
    (tmp_path / "gpt" / "20260101T000000Z-bbbbbb" / "summary.json").write_text("{")
    assert main(two) == 4
    assert "bbbbbb/summary.json" in capsys.readouterr().err


def test_benchmarks_are_compared_without_losses(tmp_path, capsys):
    for name, seconds in (("a", 0.5), ("b", 0.25)):
        directory = write_run(tmp_path / name, losses=(), config={"optimizer.lr": seconds}, state="bench")
        write_json(directory / "bench.json", {"median_s": seconds, "tokens_per_s": 1 / seconds, "degrees": {"dp": 2}})
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--md"]) == 0
    text = capsys.readouterr().out
    assert "| step time, median | 500 ms | 250 ms (-50.0%) |" in text and "losses of" not in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("number", [2, 4, 9])
def test_the_screen_fits(tmp_path, capsys, width, number):
    runs = [write_run(tmp_path / f"{index}", config={"optimizer.lr": index / 7, "model.layers": (index + 2) // 3})
            for index in range(number)]  # fmt: skip
    console = Console(width=width)
    report.show(compare([read(run) for run in runs]), [], console)
    text = capsys.readouterr().out
    tables = [line for line in text.splitlines() if ": " not in line]
    assert max(map(len, tables)) <= width
    for title in ("optimizer.lr", "model.layers", "training loss", "validation loss"):
        assert title in text
    if number == 9:
        assert "B C D" in text  # columns with one value share a line
