"""Charts as SVG, drawn by matplotlib (`pip install 'parallelrun[plots]'`). The same numbers give the same file.

Lines differ in colour (Okabe and Ito 2008), dash and marker, so that they are told apart without colour too. Only
`available` may be called before matplotlib is known to be installed.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.base.records import write_text
from parallelrun.report.figures import drawn_range, tick_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Any = ("-", "--", ":", "-.")
MARKERS = "os^Dx"
WIDTH, HEIGHT, ROW = 4.6, 3.2, 0.2  # inches of a panel, and of a line of the legend
MOST_MARKERS = 16  # on one line
CHARACTERS = 16  # per inch of the notes' width
SETTINGS: Any = {
    "pdf.fonttype": 42, "svg.hashsalt": "parallelrun", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.grid": True, "grid.color": "#e2e8f0",
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip

_METADATA = {"svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer"), "png": ("Software",)}


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write(name: str, texts: Mapping[Path, str]) -> list[Path]:
    """Write the files that `plot=name` asks for; existing ones are replaced. Raises EnvironmentProblem."""
    for path, text in texts.items():
        try:
            write_text(path, text)
        except OSError as error:
            message = f"plot={name}: {error.strerror or error}"
            raise EnvironmentProblem(Problem(message, "plot", "a name in a writable folder")) from error
    return list(texts)


def figure(width: float, height: float, title: str) -> Figure:
    """Return an empty figure, in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        drawn = Figure(figsize=(width, height), layout="constrained")
        drawn.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold")
    return drawn


def panels(title: str, names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, one for each of the names, in rows of two."""
    import matplotlib

    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    drawn = figure(columns * WIDTH, rows * HEIGHT, title)
    with matplotlib.rc_context(SETTINGS):
        axes = [drawn.add_subplot(rows, columns, 1 + index, title=name) for index, name in enumerate(names)]
    return drawn, axes


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure without a title, in inches, and its only axes."""
    import matplotlib

    drawn = figure(width, height, "")
    with matplotlib.rc_context(SETTINGS):
        return drawn, drawn.add_subplot()


def _style(number: int) -> dict[str, Any]:
    """Return colour, marker and dash of a style: the same in every panel and in the legend."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4,
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}  # fmt: skip


def line(axes: Axes, style: int, points: Sequence[tuple[float, float]], thick: bool = False) -> None:
    """Draw one series. style: its number, see `_style`."""
    every = max(1, -(-len(points) // MOST_MARKERS))
    x, y = [x for x, _ in points], [y for _, y in points]
    width, on_top = (3.0, 3) if thick else (1.6, 2)
    axes.plot(x, y, **_style(style), markevery=every, linewidth=width, zorder=on_top, gid=f"style-{style}")


def error_bars(axes: Axes, style: int, points: Sequence[tuple[float, float, float]]) -> None:
    """Draw deviations around the points (x, y, deviation) of a series."""
    if points:
        x, y, deviations = zip(*points)
        colour = _style(style)["color"]
        axes.errorbar(x, y, deviations, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3, zorder=3)


def scale(
    axes: Axes, name: str, text: Callable[[float, int], str], *, log: bool = False, base: int = 10, label: str = "",
    ticks: Sequence[float] = (), from_zero: bool = False,
) -> None:  # fmt: skip
    """Set up the `x` or `y` axis of a panel whose lines are drawn: how its numbers are written (see `tick_texts`), and
    whether steps are factors of `base`. ticks: where numbers are written; empty: where they are round. Zeros on an axis
    of factors are drawn at its lower end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis = axes.xaxis if name == "x" else axes.yaxis
    set_scale = axes.set_xscale if name == "x" else axes.set_yscale
    data: Any = [line.get_xdata() if name == "x" else line.get_ydata() for line in axes.lines]
    values = [float(value) for series in data for value in series]
    positive = [value for value in values if value > 0]
    if log and positive:
        lowest, highest = min(positive), max(positive)
        if lowest < max(values) and any(value <= 0 for value in values):
            set_scale("symlog", base=base, linthresh=lowest)
            axes.set(**{f"{name}lim": (0, None)})
        else:
            set_scale("log", base=base)
            axis.set_major_locator(MaxNLocator(5) if highest / lowest < 5 else LogLocator(base, numticks=7))
            if base == 10 and 5 <= highest / lowest < 1000:
                axis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=9))
        axis.set_minor_locator(NullLocator())
    elif from_zero:
        axes.set(**{f"{name}lim": (0, None)})
    if not from_zero and values and (limits := drawn_range(min(values), max(values))) != (min(values), max(values)):
        axes.set(**{f"{name}lim": limits})
    if ticks:
        axis.set_major_locator(FixedLocator(ticks))
    formatter: Any = FuncFormatter(lambda value, _: text(value, 3))
    formatter.format_ticks = lambda values: tick_texts(values, text)
    axis.set_major_formatter(formatter)
    axis.set_label_text(label)


def svg(figure: Figure, legend: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Return the figure as SVG. legend: its n-th text is of style n; notes: sentences below the panels."""
    return re.sub(r"[ \t]+$", "", image(figure, "svg", legend, notes).decode(), flags=re.M)


def image(figure: Figure, form: str, legend: Sequence[str] = (), notes: Sequence[str] = ()) -> bytes:
    """Return the figure as `svg`, `pdf` or `png` (300 dots per inch), without the time at which it was drawn."""
    import matplotlib
    from matplotlib.lines import Line2D

    with matplotlib.rc_context(SETTINGS):
        width = figure.get_figwidth()
        lines = [part for note in notes for part in wrap(note, int(width * CHARACTERS))]
        if legend or lines:
            styles = [Line2D([], [], **_style(number)) for number in range(len(legend))]
            columns = max(1, int(width / (0.6 + 0.07 * max(map(len, legend), default=1))))
            figure.legend(
                styles, list(legend), loc="outside lower left", ncols=columns, frameon=False, alignment="left",
                title="\n".join(lines) or None, title_fontsize=8,
            )  # fmt: skip
            rows = -(-len(legend) // columns) + len(lines)
            figure.set_figheight(figure.get_figheight() + ROW * rows)
        file = io.BytesIO()
        figure.savefig(
            file, format=form, dpi=300 if form == "png" else "figure", metadata=dict.fromkeys(_METADATA[form])
        )
    return file.getvalue()
