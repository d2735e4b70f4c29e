"""The strategies of one axis on screen, as a picture and as numbers; and the command that asks for them."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from typing import Any

import pytest
from rich.console import Console

from parallelrun.base.errors import EnvironmentProblem
from parallelrun.cli import main as program
from parallelrun.planner.facts.alternatives import Alternatives, layouts
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.report.plans.alternatives import (
    CSV_COLUMNS,
    data_axis_panel,
    drawn_strategies,
    layouts_panel,
    to_csv,
    to_svg,
    write,
)
from tests.matrix import FULL
from tests.plans import tiny_config
from tests.unit.planner.facts.test_alternatives import compared

PS = {"strategy.data.kind": "ps"}
ETHERNET = {
    "cluster.gpus_per_node": 1,
    "cluster.inter_gb_s": 3.0,
    "cluster.intra_gb_s": 12.0,
    "cluster.latency_us": 30.0,
    "cluster.peak_tflops": 1.0,
}
SHOWN = [{"dp": 4}, {"dp": 6, "global_batch": 12, **PS, "servers": 2, **ETHERNET}, {"dp": 2, **ETHERNET}]


@cache
def shown(number: int) -> Alternatives:
    return compared(SHOWN[number])


WIDTHS = [76, 100, 116]


def lines_of(panel: Any, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(panel)
    return file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("number", "width"), [(n, width) for n in range(3) for width in (WIDTHS if FULL else WIDTHS[n:][:1])]
)
def test_a_line_per_strategy_in_both_tables_and_none_is_too_wide(number, width):
    alternatives = shown(number)
    lines = lines_of(data_axis_panel(alternatives), width)
    assert max(map(len, lines)) <= width
    for strategy in alternatives.strategies:
        mark = "* " if strategy.selected else "  "
        assert width < 100 or sum(line.startswith(f"{mark}{strategy.name}  ") for line in lines) == 2
    assert ("most samples/s" in "\n".join(lines)) == alternatives.is_timed


def test_the_fastest_is_said_of_strategies_that_train_as_one_device_does():
    text = " ".join(lines_of(data_axis_panel(compared({"dp": 4, **ETHERNET})), 200))
    assert "not equal to training on one device: local_sgd, diloco" in text
    assert "most samples/s on 4 nodes: local_sgd" not in text and "most samples/s on 4 nodes: diloco" not in text


@pytest.mark.parametrize("width", [76, 100])
def test_layouts_have_a_line_each_or_their_reason(width):
    config = tiny_config({"tp": 4, "layout": "2d", "model.heads": 4, **ETHERNET})
    alternatives = layouts(resolve(config), config)
    assert alternatives is not None
    lines = lines_of(layouts_panel(alternatives, 4), width)
    assert max(map(len, lines)) <= width
    for strategy in alternatives.strategies:
        assert sum(line.lstrip("* ").startswith((f"{strategy.name} ", f"{strategy.name}:")) for line in lines) >= 1
    assert any(line.startswith("* 2d 2x2 ") for line in lines)


@pytest.mark.parametrize("number", range(3))
def test_the_picture_has_a_line_per_kind_and_the_csv_all_numbers(number):
    alternatives = shown(number)
    root = ElementTree.fromstring(to_svg(alternatives, "a <title> & more"))
    texts = [node.text for node in root.iter() if node.text]
    names = [strategy.name for strategy in drawn_strategies(alternatives)]
    assert alternatives.selected.name in names and {"ddp", "ring", "fsdp", "ps servers=1"} <= set(names)
    assert set(names) <= set(texts) and "a <title> & more" in texts
    rows = list(csv.DictReader(io.StringIO(to_csv(alternatives))))
    assert tuple(rows[0]) == CSV_COLUMNS
    for strategy in alternatives.strategies:
        own = [row for row in rows if row["strategy"] == strategy.name]
        assert [int(row["sent_bytes"]) for row in own] == [point.sent_bytes for point in strategy.curve]


def test_a_place_that_cannot_be_written_to_is_said(tmp_path):
    with pytest.raises(EnvironmentProblem, match="plot="):
        write(compared({"dp": 2}), "title", str(tmp_path / "missing" / "name"))


def test_without_matplotlib_a_picture_is_refused_with_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parallelrun.base.packages.find_spec", lambda name: None)
    for verb in ("plan", "explain"):
        assert program.main([verb, "model=gpt", "strategy=ddp", "dp=2", "plot=x"]) == 3
        assert "pip install 'parallelrun[plots]'" in capsys.readouterr().err and not list(tmp_path.iterdir())


COMMAND = "plan model=gpt strategy=ddp dp=4 cluster=ethernet_25g"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["costs", *(["costs.svg"] if FULL else []), "costs.csv"])
def test_plot_writes_the_picture_and_its_numbers_and_nothing_else_does(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(COMMAND.split()) == 0 and not list(tmp_path.iterdir())
    assert program.main([*COMMAND.split(), f"plot={name}"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.csv", "costs.svg"]
    assert "written: costs.svg" in capsys.readouterr().out


@pytest.mark.slow
def test_each_point_of_a_sweep_has_its_own_picture(tmp_path, monkeypatch, capsys, composed_once):
    monkeypatch.chdir(tmp_path)
    line = "plan -m --json model=gpt strategy=ddp,ps world=4 plot=costs detail=data_axis"
    assert program.main(line.split()) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == ["costs-0", "costs-1"]
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["data_axis"]["servers"] for point in points] == [0, 1]


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("plan model=gpt strategy=single plot=x", 2, "one rank has none to combine"),
        ("plan model=gpt strategy=ddp dp=2 plot=missing/x", 3, "a writable folder"),
        ("model=gpt strategy=ddp dp=2 plot=x", 2, "read by plan and explain only"),
    ],
)
def test_a_plot_that_cannot_be_is_refused(line, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main(line.split()) == code
    assert text in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_classic_question_is_answered(tmp_path, monkeypatch, capsys):
    """Six workers and two servers, or eight workers: the all-reduce sends less than the servers."""
    monkeypatch.chdir(tmp_path)
    line = "plan model=vgg16 strategy=ps dp=6 servers=2 cluster=ethernet_25g detail=data_axis"
    assert program.main(line.split()) == 0
    out = capsys.readouterr().out
    assert "8 nodes (6 workers, 2 servers)" in out and "* ps servers=2" in out
    assert "most samples/s on 8 nodes: ddp" in out
