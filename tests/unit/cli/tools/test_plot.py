"""`parallelrun plot`: four forms of file, readable sizes, mistakes that write nothing."""

from __future__ import annotations

import csv
import re
from itertools import product

import pytest

from parallelrun.base import packages
from parallelrun.cli.main import main
from parallelrun.report import chart
from parallelrun.report.records.run_differences import Spread
from parallelrun.report.records.series import RunSeries, SeriesPoint
from parallelrun.report.sweeps import plot
from tests.run_files import write_run

SWEEP = "sweep-20260101T000000Z-aaaaaa"
WORDS = ["plot", SWEEP, "--runs", ".", "--x", "dp", "--y", "tokens_per_s", "--by", "strategy"]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (strategy, world, seed) in enumerate(product(("ddp", "ring"), (2, 4), (1, 2))):
        config = {"strategy.name": strategy, "dp": world, "seed": seed}
        write_run(tmp_path / SWEEP / f"{number:03d}-{strategy}", config=config, tokens_per_s=100.0 * world + seed)
    (tmp_path / SWEEP / "results.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(("form", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_a_figure_is_written_the_same_each_time(sweep, capsys, form, magic):
    pytest.importorskip("matplotlib")
    assert main([*WORDS, "--to", f"figure.{form}"]) == 0
    assert capsys.readouterr().out == f"figure.{form}\n"
    content = (sweep / f"figure.{form}").read_bytes()
    assert content.startswith(magic)
    assert main([*WORDS, "--to", f"figure.{form}"]) == 0
    assert (sweep / f"figure.{form}").read_bytes() == content


@pytest.mark.parametrize(("width", "points"), [("column", 252.0), ("page", 504.0)])
def test_the_figure_has_its_width_and_text_of_9_points(sweep, width, points):
    pytest.importorskip("matplotlib")
    assert main([*WORDS, "--width", width]) == 0
    text = (sweep / "tokens_per_s-over-dp.svg").read_text()
    assert float(re.search(r'width="([\d.]+)pt"', text)[1]) == points
    sizes = {float(size) for size in re.findall(r"font(?:-size)?:[^;\"]*?([\d.]+)px", text)}
    assert sizes and min(sizes) >= 8
    for word in ("ddp", "ring", "tokens/s", "mean and standard deviation over seeds"):
        assert word in text


def test_the_numbers_are_those_of_the_runs(sweep):
    assert main([*WORDS, "--to", "numbers.csv"]) == 0
    with (sweep / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = {"series": "ddp", "dp": "2", "tokens_per_s": "201.5", "seeds": "2"}
    assert len(rows) == 4 and {key: rows[0][key] for key in expected} == expected
    assert float(rows[0]["standard_deviation"]) == pytest.approx(0.5**0.5)


def test_error_bars_are_as_high_as_the_deviations(monkeypatch):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(chart, "error_bars", lambda axes, style, points: drawn.append((style, points)))
    spreads = [Spread(10.0, 2.0, 3), Spread(20.0, None, 1)]
    lines = [RunSeries("a", tuple(SeriesPoint(float(x), spread) for x, spread in enumerate(spreads)))]
    plot.draw(lines, "world", "loss", "svg", "column", "", [])
    assert drawn == [(0, [(0.0, 10.0, 2.0)])]


@pytest.mark.parametrize("log", ["", "x", "y", "xy"])
@pytest.mark.parametrize("x", ["dp", "strategy"])
def test_every_axis_is_drawn(sweep, log, x):
    pytest.importorskip("matplotlib")
    by = "strategy" if x == "dp" else "dp"
    words = ["plot", SWEEP, "--runs", ".", "--x", x, "--y", "tokens_per_s", "--by", by, "--to", "f.svg"]
    assert main([*words, *(["--log", log] if log else [])]) == 0
    assert ">ring<" in (sweep / "f.svg").read_text()


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        (["--to", "figure.gif"], 2, "one of svg, pdf, png, csv"),
        (["--y", "nothing"], 2, "no run has it"),
        (["--to", "nowhere/figure.csv"], 3, "cannot be written"),
        (["--width", "wall"], 2, "invalid choice"),
    ],
)
def test_mistakes_write_nothing(sweep, capsys, changes, code, told):
    assert main([*WORDS, "--to", "figure.csv", *changes]) == code
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in sweep.iterdir()) == [SWEEP]


def test_without_matplotlib_the_command_that_installs_it_is_named(sweep, capsys, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    assert main([*WORDS, "--to", "figure.pdf"]) == 3
    assert "parallelrun[plots]" in capsys.readouterr().err
    assert main([*WORDS, "--to", "figure.csv"]) == 0
