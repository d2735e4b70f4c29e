"""Charts as SVG: well-formed, to scale, told apart without colour; and curves on a terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from parallelrun.report import chart, terminal_plot
from parallelrun.report.chart import Axis, Line, Panel
from parallelrun.report.figures import bytes_text, digits

X, Y = Axis("nodes", digits), Axis("seconds", digits)
SVG = "{http://www.w3.org/2000/svg}"


def drawn(*lines: Line, x: Axis = X, y: Axis = Y, legend: tuple[str, ...] = ("one", "two")) -> ElementTree.Element:
    return ElementTree.fromstring(chart.draw("title", [Panel("panel", x, y, lines)], legend, ["a < note"]))


def paths(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    """Corners of every line that is wide or dashed like a series."""
    found = []
    for node in root.iter(f"{SVG}path"):
        if node.get("stroke-width") in ("1.8", "3.2") and node.get("fill") == "none":
            points = [part.split() for part in (node.get("d") or "")[1:].split("L")]
            found.append([(float(a), float(b)) for a, b in points])
    return found


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def test_points_lie_where_their_numbers_say():
    line = Line(0, ((0.0, 1.0), (5.0, 2.0), (10.0, 3.0)))
    (first, second, third), *_ = paths(drawn(line))
    assert first[0] < second[0] < third[0] and second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.2)
    assert first[1] > second[1] > third[1] and first[1] - second[1] == pytest.approx(second[1] - third[1], abs=0.2)


def test_on_an_axis_of_factors_equal_factors_are_equally_far_apart():
    factors = Axis("n", digits, log=True)
    (a, b, c), *_ = paths(drawn(Line(0, ((1.0, 1.0), (10.0, 10.0), (100.0, 100.0))), x=factors, y=factors))
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.2) and a[1] - b[1] == pytest.approx(b[1] - c[1], abs=0.2)


def test_nothing_lies_left_of_everything_on_an_axis_of_factors_and_is_written_as_0():
    root = drawn(Line(0, ((0.0, 1.0), (1.0, 2.0), (1000.0, 3.0))), x=Axis("bytes", digits, log=True))
    (nothing, one, _), *_ = paths(root)
    assert nothing[0] < one[0] - 10 and "0" in texts(root)


def test_an_axis_from_zero_begins_at_zero():
    line = Line(0, ((4.0, 1.0), (8.0, 2.0)))
    (without, _), *_ = paths(drawn(line))
    (at_four, at_eight), *_ = paths(drawn(line, x=Axis("s", digits, from_zero=True)))
    assert at_four[0] - without[0] == pytest.approx(at_eight[0] - at_four[0], abs=0.2)


@pytest.mark.parametrize("points", [(), ((3.0, 3.0),), ((3.0, 3.0), (3.0, 3.0)), ((0.0, 0.0),), ((1e-12, 1e12),)])
@pytest.mark.parametrize("log", [False, True])
def test_few_or_equal_numbers_are_drawn_too(points, log):
    root = drawn(Line(0, points), x=Axis("", digits, log=log), y=Axis("", digits, log=log))
    assert "nan" not in ElementTree.tostring(root).decode() and "inf" not in ElementTree.tostring(root).decode()


def test_texts_are_escaped_and_all_there():
    found = texts(drawn(Line(0, ((1.0, 1.0), (2.0, 2.0))), legend=("a & b", "<c>")))
    assert {"title", "panel", "a & b", "<c>", "a < note", "nodes", "seconds"} <= set(found)


def test_series_differ_without_colour_and_panels_share_their_style():
    styles = set()
    for style in range(20):
        root = drawn(Line(style, ((1.0, 1.0), (2.0, 2.0))), legend=())
        node = next(node for node in root.iter(f"{SVG}path") if node.get("stroke-width") == "1.8")
        marker = chart._marker(0, 0, style).replace(chart.COLOURS[style % len(chart.COLOURS)], "")
        styles.add((node.get("stroke"), node.get("stroke-dasharray"), marker))
    assert len(styles) == 20
    assert len({style[1:] for style in styles}) >= 10  # without colour


def test_a_thick_line_is_drawn_last():
    widths = [node.get("stroke-width") for node in drawn(Line(0, ((1.0, 1.0), (2.0, 2.0)), thick=True),
              Line(1, ((1.0, 2.0), (2.0, 1.0))), legend=()).iter(f"{SVG}path")]  # fmt: skip
    assert [width for width in widths if width in ("1.8", "3.2")] == ["1.8", "3.2"]


def test_panels_stand_in_rows_above_one_legend():
    panels = [Panel(name, X, Y, (Line(0, ((1.0, 1.0), (2.0, 2.0))),)) for name in ("a", "b", "c")]
    root = ElementTree.fromstring(chart.draw("title", panels, ["one"], columns=2))
    place = {node.text: (float(node.get("x") or 0), float(node.get("y") or 0)) for node in root.iter(f"{SVG}text")}
    assert place["a"][1] == place["b"][1] < place["c"][1] < place["one"][1] and place["a"][0] == place["c"][0]
    assert float(root.get("height") or 0) > place["one"][1]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (3.1, 4.7, [3.5, 4, 4.5]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 0.3, [0, 0.1, 0.2, 0.3]),
        (1e6, 3e6, [1e6, 1.5e6, 2e6, 2.5e6, 3e6]),
    ],
)
def test_round_steps(low, high, ticks):
    assert chart.round_steps(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (0.9, 1.1e4, [1, 10, 100, 1000, 10000]),
        (1e-12, 1e12, None),
        (3, 4, [3, 3.2, 3.4, 3.6, 3.8, 4]),
    ],
)
def test_round_factors(low, high, ticks):
    found = chart.round_factors(low, high)
    assert 2 <= len(found) <= 8 and all(low <= tick <= high * (1 + 1e-9) for tick in found)
    assert ticks is None or found == pytest.approx(ticks)


def test_ticks_of_bytes_are_round_in_their_unit():
    amount = Axis("sent", bytes_text, of_bytes=True)
    found = texts(drawn(Line(0, ((2.0, 16 * 2.0**20), (8.0, 112 * 2.0**20))), y=amount))
    assert {"50 MiB", "100 MiB"} <= set(found)
    factors = Axis("sent", bytes_text, log=True, of_bytes=True)
    found = texts(drawn(Line(0, ((2.0, 70 * 2.0**10), (8.0, 12 * 2.0**20))), y=factors))
    assert {"64 KiB", "256 KiB", "1 MiB", "4 MiB"} <= set(found)


def test_a_long_note_is_wrapped_inside_the_picture():
    note = "what all nodes send together " * 8
    root = ElementTree.fromstring(chart.draw("t", [Panel("p", X, Y, (Line(0, ((1.0, 1.0),)),))], ["a"], [note]))
    lines = [text for text in texts(root) if "nodes send" in text]
    assert len(lines) > 2 and max(map(len, lines)) * chart.CHARACTER * chart.NOTE < chart.WIDTH - 20


RISING = tuple((float(n), float(n)) for n in range(2, 17))
FLAT = tuple((float(n), 4.0) for n in range(2, 17))


def plot(*curves: terminal_plot.Curve, width: int = 60) -> list[str]:
    return terminal_plot.draw(curves, width, 9, "{:g}".format, digits).plain.splitlines()


def test_a_curve_climbs_from_the_lower_left_to_the_upper_right():
    rows = [line.partition("|")[2] for line in plot(terminal_plot.Curve("r", "rising", RISING))[:9]]
    places = [(row, line.index("r")) for row, line in enumerate(rows) if "r" in line]
    assert len(places) == 9 and places == sorted(places) and places[0][1] > places[-1][1] == 0
    assert rows[0].rstrip().endswith("r") and len(rows[0].rstrip()) > 50


def test_every_column_of_a_curve_is_filled():
    rows = [
        line.partition("|")[2].ljust(60) for line in plot(terminal_plot.Curve("f", "flat", FLAT[:2] + FLAT[-1:]))[:9]
    ]
    (row,) = [row.rstrip() for row in rows if "f" in row]
    assert set(row) == {"f"} and len(row) >= 50


def test_where_curves_meet_the_bold_one_is_seen():
    curves = [terminal_plot.Curve("a", "first", FLAT), terminal_plot.Curve("b", "own", FLAT, bold=True)]
    body = "".join(line.partition("|")[2] for line in plot(*curves)[:9])
    assert "b" in body and "a" not in body
    assert "a" in "".join(
        line.partition("|")[2] for line in plot(curves[0], terminal_plot.Curve("c", "last", FLAT))[:9]
    )


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_line_of_the_plot_is_too_wide_and_the_ends_are_written(width):
    lines = plot(terminal_plot.Curve("r", "x", RISING), width=width)
    assert max(map(len, lines[:11])) <= width
    numbers = lines[10].split()
    assert numbers[0] == "2" and numbers[-1] == "16" and {"4", "8"} <= set(numbers)
    assert lines[0].split()[0] == "16" and lines[8].split()[0] == "2"
