"""Charts as SVG: well-formed, to scale, told apart without colour, and the same file for the same numbers."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parallelrun.report import chart
from parallelrun.report.figures import bytes_text, digits, seconds_text

SVG = "{http://www.w3.org/2000/svg}"
Points = list[tuple[float, float]]


def one_panel(*lines: Points) -> tuple[Figure, Axes]:
    figure, (axes,) = chart.panels("title", ["panel"])
    for style, points in enumerate(lines):
        chart.line(axes, style, points)
    return figure, axes


def texts(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_the_same_numbers_give_the_same_file_without_a_date():
    def drawn() -> str:
        figure, axes = one_panel([(1, 1), (2, 4)], [(1, 2), (2, 3)])
        chart.scale(axes, "x", digits)
        return chart.svg(figure, ["one", "two"], ["a note"])

    assert drawn() == drawn() and "<dc:date>" not in drawn()


def test_texts_are_escaped_and_all_there():
    figure, axes = one_panel([(1, 1), (2, 2)], [(1, 1), (2, 2)])
    chart.scale(axes, "x", digits, label="nodes")
    chart.scale(axes, "y", digits, label="seconds")
    picture = chart.svg(figure, ["a & b", "<c>"], ["a < note"])
    assert {"title", "panel", "a & b", "<c>", "a < note", "nodes", "seconds"} <= set(texts(picture))


def test_on_an_axis_of_factors_numbers_are_written_at_round_factors():
    figure, axes = one_panel([(1, 1), (10, 10), (100, 200)])
    chart.scale(axes, "x", "{:g}".format, log=True, ticks=[1, 10, 100])
    chart.scale(axes, "y", "{:g}".format, log=True)
    assert axes.get_xscale() == axes.get_yscale() == "log"
    found = texts(chart.svg(figure))
    assert {"1", "10", "100", "20", "50", "200"} <= set(found) and "3" not in found


def test_zeros_on_an_axis_of_factors_are_drawn_at_its_lower_end():
    figure, axes = one_panel([(0, 1), (1, 2), (1000, 3)])
    chart.scale(axes, "x", "{:g}".format, log=True)
    chart.scale(axes, "y", digits)
    assert axes.get_xlim()[0] == 0 and axes.get_xscale() == "symlog" and "0" in texts(chart.svg(figure))


def test_bytes_are_written_at_powers_of_two():
    figure, axes = one_panel([(2.0, 70 * 2.0**10), (8.0, 12 * 2.0**20)])
    chart.scale(axes, "y", bytes_text, log=True, base=2)
    found = [text for text in texts(chart.svg(figure)) if text.endswith("iB")]
    assert len(found) >= 3 and all(float(text.split()[0]) in [2.0**n for n in range(10)] for text in found)


@pytest.mark.parametrize(
    ("low", "high", "text", "wanted"),
    [
        (4.3811, 4.3814, digits, {"4.3811", "4.3812", "4.3813", "4.3814"}),
        (1.5e-6, 3e-6, digits, {"1.6e-06", "2e-06", "2.4e-06", "3e-06"}),
        (1.2341, 1.2344, seconds_text, {"1.2341 s", "1.2342 s", "1.2343 s", "1.2344 s"}),
        (2**20 * 1.001, 2**20 * 1.002, bytes_text, {"1.001 MiB", "1.002 MiB"}),
    ],
)
def test_ticks_are_told_apart_and_exact(low: float, high: float, text: Callable[..., str], wanted: set[str]):
    figure, axes = one_panel([(1, low), (2, high)])
    chart.scale(axes, "y", text, ticks=(low, high) if text is bytes_text else ())
    assert wanted <= set(texts(chart.svg(figure)))


@pytest.mark.parametrize("log", [False, True])
def test_lines_that_are_equal_within_rounding_are_drawn_as_equal(log: bool):
    _, axes = one_panel([(1, 4.381), (2, 4.381)], [(1, 4.3810001), (2, 4.3810004)])
    chart.scale(axes, "y", digits, log=log)
    low, high = axes.get_ylim()
    assert high - low > 0.5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("points", [[], [(3.0, 3.0)], [(3.0, 3.0), (3.0, 3.0)], [(0.0, 0.0)], [(1e-12, 1e12)]])
@pytest.mark.parametrize("log", [False, True])
def test_few_or_equal_numbers_are_drawn_too(points: Points, log: bool):
    figure, axes = one_panel(points)
    for name in ("x", "y"):
        chart.scale(axes, name, digits, log=log)
    ElementTree.fromstring(chart.svg(figure))


def test_series_differ_without_colour_and_the_legend_has_their_styles():
    figure, axes = one_panel(*([(1.0, 1.0), (2.0, 2.0)] for _ in range(20)))
    styles = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
    assert len(set(styles)) == 20 and len({style[1:] for style in styles}) >= 10
    chart.svg(figure, [f"line {n}" for n in range(20)])
    legend = figure.legends[0]
    assert [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in legend.legend_handles] == styles
    assert [text.get_text() for text in legend.get_texts()] == [f"line {n}" for n in range(20)]


def test_a_thick_line_is_drawn_on_top():
    _, axes = one_panel([(1, 1), (2, 2)])
    chart.line(axes, 1, [(1, 2), (2, 1)], thick=True)
    thin, thick = axes.lines
    assert thick.get_zorder() > thin.get_zorder() and thick.get_linewidth() > thin.get_linewidth()
