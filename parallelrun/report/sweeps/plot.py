"""A figure for a paper: one result over a key, as SVG, PDF or PNG (by matplotlib), or its numbers as CSV.

Text has 9 points at the figure's own size, which is that of one column (3.5 inches) or of a page (7 inches).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from parallelrun.report import chart
from parallelrun.report.figures import csv_text, digits
from parallelrun.report.records.metrics import label_of, metric_text
from parallelrun.report.records.series import RunSeries

FORMS = ("svg", "pdf", "png", "csv")
WIDTHS = {"column": 3.5, "page": 7.0}  # inches
RATIO = 0.7  # height over width of a column; a page is as high as a column is wide
MOST_TICKS = 8


def draw(lines: Sequence[RunSeries], x: str, y: str, form: str, width: str, log: str, notes: Sequence[str]) -> bytes:
    """Return the file. form: of FORMS; width: of WIDTHS; log: the axes whose steps are factors, `x`, `y` or `xy`."""
    if form == "csv":
        return to_csv(lines, x, y).encode()
    inches = WIDTHS[width]
    drawn, axes = chart.panel(inches, WIDTHS["column"] * (RATIO if width == "column" else 1.0))
    words = [*dict.fromkeys(point.x for line in lines for point in line.points)]
    is_text = any(isinstance(word, str) for word in words)
    for style, line in enumerate(lines):
        points = [(float(words.index(point.x) if is_text else point.x), point.y) for point in line.points]
        chart.line(axes, style, [(at, spread.mean) for at, spread in points])
        if is_text:  # between two names there is nothing
            axes.lines[-1].set_linestyle("none")
        spreads = [
            (at, spread_at.mean, spread_at.deviation) for at, spread_at in points if spread_at.deviation is not None
        ]
        chart.error_bars(axes, style, spreads)
    ticks = [float(index if is_text else word) for index, word in enumerate(words)]
    few = sorted(ticks) if len(ticks) <= MOST_TICKS else []
    chart.scale(axes, "x", (lambda at, _: str(words[round(at)])) if is_text else digits,
                log="x" in log and not is_text, ticks=few, label=x)  # fmt: skip
    from_zero = "loss" not in y and "y" not in log
    chart.scale(axes, "y", partial(metric_text, y), log="y" in log, from_zero=from_zero, label=label_of(y))
    legend = [line.label for line in lines] if len(lines) > 1 else []
    return chart.image(drawn, form, legend, notes)


def to_csv(lines: Sequence[RunSeries], x: str, y: str) -> str:
    """Return a row per point: mean, standard deviation and number of seeds."""
    rows = [(line.label, point.x, point.y.mean, "" if point.y.deviation is None else point.y.deviation, point.y.count)
            for line in lines for point in line.points]  # fmt: skip
    return csv_text([("series", x, y, "standard_deviation", "seeds"), *rows])
