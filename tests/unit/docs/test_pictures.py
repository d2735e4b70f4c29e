"""Every documented picture is what its files and today's code draw, and no text in it is cut or covered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from parallelrun.report import chart
from tests.matrix import FULL
from tests.unit.docs import DOCS, docs_module

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def crossover(path: Path) -> str:
    from benchmarks import crossover

    facts = json.loads(path.with_suffix(".json").read_text())["environment"]
    return crossover.picture(crossover.read_back(path.with_suffix(".csv")), facts)


def routing_balance(path: Path) -> str:
    from benchmarks import routing_balance

    document = json.loads(path.with_suffix(".json").read_text())
    return routing_balance.picture(document["rows"], document["environment"])


def scaling(path: Path) -> str:
    from benchmarks import scaling

    rows = json.loads(path.with_suffix(".json").read_text())["rows"]
    return scaling.picture(rows, rows[-1]["environment"])


OF_RESULTS = {"crossover": crossover, "routing_balance": routing_balance, "scaling": scaling}


def drawn_by(path: Path) -> Callable[[], str]:
    """How a picture of the repository is drawn today."""
    if path.parent == RESULTS:
        return lambda: OF_RESULTS[path.stem.rpartition("-")[2]](path)
    if path.parent.name == "layouts":
        module = docs_module("layouts")
        return lambda: module.draw(next(one for one in module.PICTURES if one.name == path.stem))
    return docs_module({"run": "picture"}.get(path.stem, path.stem)).draw


PICTURES = sorted(path for folder in (DOCS, RESULTS) for path in folder.rglob("*.svg"))


# By default two of the pictures of layouts: `test_layouts.py` compares each with what is drawn today.
DRAWN = [path for path in PICTURES if FULL or path.parent.name != "layouts" or path.stem in ("1d", "25d")]


@pytest.mark.slow
@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_picture_is_what_its_files_give_today_and_no_text_is_cut_or_covered(path, monkeypatch):
    figures: list[Figure] = []
    real = chart.svg
    monkeypatch.setattr(chart, "svg", lambda figure, *rest: (figures.append(figure), real(figure, *rest))[1])
    assert path.read_text() == drawn_by(path)(), f"{path.name} is older than the code or the numbers that draw it"
    assert len(figures) == (path.name != "run.svg"), "rich draws the screen of a run, matplotlib everything else"
    for figure in figures:
        assert_texts_are_legible(figure)


def assert_texts_are_legible(figure: Figure) -> None:
    """Every text is inside the figure, and no two overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts(figure)]
    assert len(boxes) > 3
    for words, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, f"{words!r} leaves the picture"
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} overlaps {other!r}"


def texts(figure: Figure) -> Iterator[Text]:
    """The texts that are drawn: not those of ticks outside the limits of their axis."""
    hidden = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, sorted(axes.get_xlim())), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9 or not axes.axison:
                    hidden |= {tick.label1, tick.label2}
        if not axes.axison:
            hidden |= {axes.xaxis.label, axes.yaxis.label}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text


def test_an_overlap_and_a_cut_text_are_noticed():
    figure, (axes,) = chart.panels("title", ["panel"])
    chart.line(axes, 0, [(1, 1), (2, 2)])
    assert_texts_are_legible(figure)
    added = axes.text(1.5, 1.5, "one text")
    axes.text(1.5, 1.5, "another text")
    with pytest.raises(AssertionError, match="overlaps"):
        assert_texts_are_legible(figure)
    added.set_position((1.99, 1.2))
    added.set_text("long " * 30)
    with pytest.raises(AssertionError, match="leaves the picture"):
        assert_texts_are_legible(figure)


def test_every_picture_is_checked():
    assert {"25d.svg", "data_axis.svg", "run.svg", "2026-11-21-crossover.svg"} <= {path.name for path in PICTURES}
