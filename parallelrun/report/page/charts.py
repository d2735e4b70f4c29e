"""Charts as inline SVG, drawn without any library: lines over steps, bars, cells. Colours come from the style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from parallelrun.report.figures import digits, drawn_range, thinned, tick_texts
from parallelrun.report.page.style import DASHES, NUM_COLOURS

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 8, 38  # margins
MOST_POINTS = 300  # of a line; more are averaged
SPREAD = 30  # largest over smallest number; above it the axis is logarithmic
LONGEST_TICK = 8  # characters, which the left margin holds
BAR = 26  # height of a bar's row


@dataclass(frozen=True)
class ChartLine:
    """One series. style: its number, which chooses colour and dash; deviation: by point, drawn as a band."""

    label: str
    style: int
    points: Sequence[tuple[float, float]]
    deviation: Sequence[float] = field(default=())


def line_chart(title: str, lines: Sequence[ChartLine], *, from_zero: bool = False) -> str:
    """Return a figure of the lines that have points; empty if none has."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    shown = [(line, thinned(line.points, MOST_POINTS)) for line in lines]
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points] + [0.0] * from_zero
    log = min(ys) > 0 and max(ys) / min(ys) > SPREAD
    if not log:  # whose lower end a band may leave
        ys += [y + sign * by for line in lines for (_, y), by in zip(line.points, line.deviation) for sign in (-1, 1)]
    x_of, x_ticks = _scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_of, y_ticks = _scale(*drawn_range(min(ys), max(ys)), HEIGHT - _BOTTOM, _TOP, log)
    y_texts, base = _labels(y_ticks)
    title += " (logarithmic)" if log else f" - {base}" if base else ""
    parts = [_axes(x_of, x_ticks, y_of, zip(y_ticks, y_texts))]
    for line, points in shown:
        parts.append(_band(line, x_of, y_of))
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        hint = f"{line.label}: {digits(line.points[0][1])} to {digits(line.points[-1][1])}"
        if len(points) == 1:
            (x, y) = points[0]
            parts.append(f'<circle class="f{line.style % NUM_COLOURS}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3">'
                         f"<title>{escape(hint)}</title></circle>")  # fmt: skip
        else:
            parts.append(f'<polyline {_stroke(line.style)} points="{path}"><title>{escape(hint)}</title></polyline>')
    return _figure(title, WIDTH, HEIGHT, parts)


def legend(lines: Sequence[tuple[str, int]]) -> str:
    """Return the legend of (label, style)."""
    return _keys((label, f'<polyline {_stroke(style)} points="0,5 30,5"/>') for label, style in lines)


def _keys(items: Iterable[tuple[str, str]], last: str = "") -> str:
    """Return a legend of (label, what is drawn before it). last: an item without a drawing."""
    parts = [f'<svg viewBox="0 0 30 10" aria-hidden="true">{drawn}</svg>{escape(label)}' for label, drawn in items]
    return f'<ul class="legend">{"".join(f"<li>{part}</li>" for part in [*parts, *filter(None, [last])])}</ul>'


def stacked_bars(title: str, rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str],
                 text: Callable[[float], str]) -> str:  # fmt: skip
    """Return a figure with a bar per row, cut into parts. names: of the parts, which have the colours in turn."""
    longest = max((sum(values) for _, values in rows), default=0.0)
    if longest <= 0:
        return ""
    left = 16 + 8 * max(len(label) for label, _ in rows)
    width, parts = 2 * WIDTH, []
    scale = (width - left - 110) / longest
    for index, (label, values) in enumerate(rows):
        y, x = 4 + index * BAR, float(left)
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        for colour, (name, value) in enumerate(zip(names, values)):
            if value > 0:
                hint = escape(f"{label}: {name} {text(value)}")
                place = f'x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{BAR - 6}"'
                parts.append(f'<rect class="bar f{colour % NUM_COLOURS}" {place}><title>{hint}</title></rect>')
            x += value * scale
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{escape(text(sum(values)))}</text>')
    keys = _keys((name, _swatch(f"f{index % NUM_COLOURS}")) for index, name in enumerate(names))
    return _figure(title, width, 8 + len(rows) * BAR, parts, keys)


@dataclass(frozen=True)
class GanttCell:
    """One action: row (a pp rank), kind (an index into `kinds`), its begin and end, and the text inside it."""

    row: int
    kind: int
    begin: float
    end: float
    text: str


def gantt(title: str, cells: Sequence[GanttCell], kinds: Sequence[str]) -> str:
    """Return a figure with a row per pp rank; gaps are idle."""
    end, num_rows = max(cell.end for cell in cells), 1 + max(cell.row for cell in cells)
    width, left = 2 * WIDTH, 52
    scale = (width - left - 8) / end
    parts = [f'<text x="{left - 8}" y="{19 + row * BAR}" text-anchor="end">pp {row}</text>'
             for row in range(num_rows)]  # fmt: skip
    for cell in cells:
        x, size, y = left + cell.begin * scale, (cell.end - cell.begin) * scale, 4 + cell.row * BAR
        hint = f"{kinds[cell.kind]} of microbatch {cell.text}"
        parts.append(f'<rect class="bar k{cell.kind}" x="{x:.1f}" y="{y}" width="{size:.1f}" height="{BAR - 4}">'
                     f"<title>{escape(hint)}</title></rect>")  # fmt: skip
        if size > 8 * len(cell.text) + 2:
            parts.append(f'<text class="inside" x="{x + size / 2:.1f}" y="{y + 15}">{escape(cell.text)}</text>')
    keys = _keys(((kinds[kind], _swatch(f"k{kind}")) for kind in sorted({cell.kind for cell in cells})), "gap: idle")
    return _figure(title, width, 8 + num_rows * BAR, parts, keys)


def heat_map(title: str, cells: Sequence[Sequence[str]], labels: Sequence[str], first: int, last: int) -> str:
    """Return a figure of coloured cells (`#rrggbb`, "" for none), a row for each label, over steps first to last."""
    left, height = 52, 14
    wide = (WIDTH - left - 8) / len(cells[0])
    parts = []
    for row, (label, colours) in enumerate(zip(labels, cells)):
        parts.append(_tick(left - 6, row * height + 12, label, "end"))
        for column, colour in enumerate(colours):
            if colour:
                place = f'x="{left + column * wide:.1f}" y="{row * height}" width="{wide + 0.3:.1f}" height="{height}"'
                parts.append(f'<rect {place} fill="{colour}"/>')
    bottom = len(cells) * height + 15
    parts += [_tick(left, bottom, f"step {first}", "start"), _tick(WIDTH - 8, bottom, str(last), "end")]
    return _figure(title, WIDTH, bottom + 6, parts)


def _figure(title: str, width: int, height: int, parts: Sequence[str], below: str = "") -> str:
    scrolls = ' class="big" tabindex="0"' if width > WIDTH else ""  # on a narrow screen
    return (
        f'<figure{scrolls}><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>{below}</figure>'
    )


def _swatch(colour: str) -> str:
    return f'<rect class="{colour}" width="30" height="10"/>'


def _stroke(style: int) -> str:
    dash = DASHES[style % len(DASHES)]
    return f'class="line s{style % NUM_COLOURS}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _band(line: ChartLine, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    if not line.deviation:
        return ""
    pairs = [(x, y, deviation) for (x, y), deviation in zip(line.points, line.deviation)]
    above = thinned([(x, y + deviation) for x, y, deviation in pairs], MOST_POINTS)
    below = thinned([(x, y - deviation) for x, y, deviation in pairs], MOST_POINTS)
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in [*above, *reversed(below)])
    return f'<polygon class="band f{line.style % NUM_COLOURS}" points="{path}"/>'


def _axes(x_of: Callable[[float], float], x_ticks: Sequence[float], y_of: Callable[[float], float],
          y_ticks: Iterable[tuple[float, str]]) -> str:  # fmt: skip
    bottom = HEIGHT - _BOTTOM
    parts = []
    for y, text in y_ticks:
        at = y_of(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_tick(_LEFT - 6, at + 4, text, "end"))
    texts, base = _labels(x_ticks)
    parts += [_tick(x_of(x), bottom + 17, text, "middle") for x, text in zip(x_ticks, texts)]
    parts.append(_tick((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 4, f"step - {base}" if base else "step", "middle"))
    return "".join(parts)


def _labels(ticks: Sequence[float]) -> tuple[list[str], str]:
    """Return the texts of the ticks and the number that they leave out: "" unless they would be too long with it."""
    texts = tick_texts(ticks, tick_text)
    if max(map(len, texts)) <= LONGEST_TICK:
        return texts, ""
    return tick_texts([tick - ticks[0] for tick in ticks], tick_text), f"{ticks[0]:.15g}"


def _tick(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def tick_text(value: float, significant: int = 4) -> str:
    """Return a round number, short: 0.002, 2.5, 12k, 3M, 1e-06."""
    size, significant = abs(value), max(significant, 4)
    if size >= 1e6:
        return f"{value / 1e6:.{significant}g}M"
    if size >= 1e4:
        return f"{value / 1e3:.{significant}g}k"
    return f"{value:.{significant}g}"


def _scale(
    low: float, high: float, start: float, stop: float, log: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Return a function from a value to its coordinate, and round values for the ticks."""
    if log:
        first, last = math.log10(low), math.log10(high)
        powers = [10.0**power for power in range(math.floor(first), math.ceil(last) + 1)]
        marks = [value * factor for value in powers for factor in (1, 2, 5)]
        inside = [value for value in marks if low * 0.999 <= value <= high * 1.001]
        return lambda value: start + (math.log10(max(value, low)) - first) / (last - first) * (stop - start), inside[:9]
    if high == low:  # one step
        low, high = low - 1.0, high + 1.0
    step = _round_step((high - low) / 5)
    step = step if start > stop else max(1.0, step)  # the steps of a run are whole numbers
    first, last = math.floor(low / step) if start > stop else low / step, high / step
    low = first * step if start > stop else low
    high = math.ceil(last - 1e-9) * step if start > stop else high
    ticks = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return lambda value: start + (value - low) / (high - low) * (stop - start), ticks


def _round_step(step: float) -> float:
    """Return the next larger 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
