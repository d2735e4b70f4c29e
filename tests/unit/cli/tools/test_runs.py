"""`parallelrun runs ls|show|gc`: tables, documents, mistakes; that a long list reads only what it shows."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from parallelrun.cli.main import main
from parallelrun.cli.tools import runs as command
from parallelrun.report.records.rows import read_row
from parallelrun.report.runs import run_list as report
from tests.run_files import write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(30):
        state = "failed" if number == 3 else "done"
        write_run(tmp_path / "runs" / f"gpt-{number % 3}" / f"202601{number + 1:02d}T000000Z-{number:06x}", state=state)
    return tmp_path / "runs"


def listed(capsys, *words: str) -> list[str]:
    assert main(["runs", "ls", *words, "--json"]) == 0
    return [one["run"] for one in json.loads(capsys.readouterr().out)["runs"]]


def test_ls_lists_the_newest_first(runs, capsys):
    assert listed(capsys) == [f"{number:06x}" for number in range(29, 9, -1)]
    assert listed(capsys, "--limit", "2") == ["00001d", "00001c"]
    assert len(listed(capsys, "--all")) == 30
    assert listed(capsys, "--state", "failed") == ["000003"]
    assert listed(capsys, "gpt-2", "--limit", "1") == ["00001d"] and len(listed(capsys, "gpt-?", "--all")) == 30
    assert main(["runs", "ls"]) == 0
    assert "... 10 older runs: --all, or --limit N" in capsys.readouterr().out


def test_ls_reads_only_the_runs_that_it_shows(runs, capsys, monkeypatch):
    read = []
    monkeypatch.setattr(command, "read_row", lambda directory: read.append(directory) or read_row(directory))
    listed(capsys, "--limit", "5")
    assert len(read) == 5


def test_one_broken_run_does_not_hide_the_others(runs, capsys):
    (runs / "gpt-2" / "20260130T000000Z-00001d" / "summary.json").write_text("{")
    assert main(["runs", "ls"]) == 0
    text = capsys.readouterr().out
    assert "broken" in text and text.count("done") == 19


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("styled", [True, False])
def test_the_table_fits(runs, capsys, monkeypatch, width, styled):
    monkeypatch.setattr(report, "_MOST_STYLED", 200 if styled else 1)
    rows = [read_row(path) for path in sorted(runs.glob("*/*"))[:4]]
    report.show_table(rows, 0, Console(width=width))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= width
    assert ("memory" in lines[0]) == (width == 120) or "loss" in lines[0]


def test_show_prints_where_a_run_came_from(runs, capsys):
    assert main(["runs", "show", "000003"]) == 0
    text = capsys.readouterr().out
    assert "failed" in text and "torch 2.13.0" in text
    assert main(["runs", "show", "000004", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["config"]["seed"], found["results"]["val_loss"]) == ("done", 1, 3.0)


def test_before_the_first_run_there_is_nothing_to_list(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "ls"]) == 0
    assert capsys.readouterr().out == "no such runs in runs\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls", "--runs", "nowhere"], "nowhere: no such folder"),
        (["show", "nope"], "no run nope"),
        (["ls", "--limit", "0"], "a number from 1"),
        (["clean"], "invalid choice"),
        ([], "required"),
    ],
)
def test_mistakes_are_exit_2(runs, capsys, words, told):
    assert main(["runs", *words]) == 2
    assert told in capsys.readouterr().err
