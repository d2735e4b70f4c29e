"""Line charts and heat maps as SVG text, from plain numbers: no library, the same text for the same data. Torch-free.

Lines differ in colour (Okabe and Ito 2008: told apart by colour-blind readers), dash and marker at once, so that a
print without colour can be read too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log2, log10
from textwrap import wrap

from parallelrun.report.figures import byte_unit

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
MARKERS = ("circle", "square", "triangle", "diamond", "cross")
WIDTH, HEIGHT = 430, 300  # of one panel, in pixels, its labels included
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 34, 46  # of a panel around its plot
LEGEND_ROW, MOST_MARKERS, MOST_TICKS = 18, 16, 6
LEAST_SPAN = 0.05  # of the numbers' size: smaller differences are drawn small
ROOM_FOR_ZERO = 0.1  # of an axis of factors, where there are numbers that it has no place for
NOTE = 11  # font size
CHARACTER = 0.58  # of a sans-serif font's size: the mean width of a character
INK, GRID = "#1a202c", "#e2e8f0"


@dataclass(frozen=True)
class Line:
    """One series. style: which colour, dash and marker; the same number in every panel and in the legend."""

    style: int
    points: tuple[tuple[float, float], ...]
    thick: bool = False


@dataclass(frozen=True)
class Axis:
    """label, how a number is written on it, and whether its steps are factors. On such an axis numbers of 0 or less lie
    at its lower end. ticks: where to write numbers; empty: where they are round. from_zero: an axis of
    even steps begins at 0. of_bytes: round means round in KiB, MiB, ..."""

    label: str
    text: Callable[[float], str]
    log: bool = False
    ticks: tuple[float, ...] = ()
    from_zero: bool = False
    of_bytes: bool = False


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class HeatMap:
    """A plot of colours. cells[row][column]: numbers from 0 to `most` (more looks alike), 1.0 in the middle of the
    colours; None: blank. rows: what each is called, the first on top. x: the columns are equal parts of `span`."""

    title: str
    cells: tuple[tuple[float | None, ...], ...]
    rows: tuple[str, ...]
    y_label: str
    x: Axis
    span: tuple[float, float]
    most: float


@dataclass(frozen=True)
class _Scale:
    """Data -> pixels along one axis."""

    axis: Axis
    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        share = (_place(value, self.axis) - _place(self.low, self.axis)) / (
            _place(self.high, self.axis) - _place(self.low, self.axis)
        )
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.axis.ticks:
            return [tick for tick in self.axis.ticks if self.low <= tick <= self.high]
        if self.axis.of_bytes and self.axis.log:
            return powers_of_two(self.low, self.high)
        unit = byte_unit(max(abs(self.low), abs(self.high)))[1] if self.axis.of_bytes else 1
        rounded = round_factors if self.axis.log else round_steps
        return [tick * unit for tick in rounded(self.low / unit, self.high / unit)]


def draw(
    title: str, panels: Sequence[Panel | HeatMap], legend: Sequence[str], notes: Sequence[str] = (), columns: int = 2
) -> str:
    """The panels in rows of `columns`, over one legend (its n-th text is of style n) and notes, as one SVG document."""
    columns = max(1, min(columns, len(panels)))
    width = columns * WIDTH
    notes = [line for note in notes for line in wrap(note, int((width - 40) / (CHARACTER * NOTE)))]
    top = 40
    bottom = top + -(-len(panels) // columns) * HEIGHT
    per_row = max(1, width // max(150, 60 + 7 * max((len(text) for text in legend), default=1)))
    legend_rows = -(-len(legend) // per_row)
    height = bottom + LEGEND_ROW * (legend_rows + len(notes)) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        place = index % columns * WIDTH, top + index // columns * HEIGHT
        parts += _heat_map(panel, *place) if isinstance(panel, HeatMap) else _panel(panel, *place)
    for index, text in enumerate(legend):
        x, y = 20 + index % per_row * (width - 20) // per_row, bottom + 12 + index // per_row * LEGEND_ROW
        parts.append(_stroke([(x, y), (x + 30, y)], index))
        parts += [_marker(x + 15, y, index), f'<text x="{x + 38}" y="{y + 4}">{escape(text)}</text>']
    for index, text in enumerate(notes):
        y = bottom + 16 + (legend_rows + index) * LEGEND_ROW
        parts.append(f'<text x="20" y="{y}" fill="#4a5568" font-size="{NOTE}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, top: float) -> list[str]:
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points]
    x = _scale(panel.x, xs, left + LEFT, left + WIDTH - RIGHT, spare=0.0)
    y = _scale(panel.y, ys, top + HEIGHT - BOTTOM, top + TOP, spare=0.04)
    middle = (x.start + x.stop) / 2
    parts = [f'<text x="{left + LEFT}" y="{top + TOP - 12}" font-weight="bold">{escape(panel.title)}</text>']
    for tick in x.ticks():
        parts.append(_rule(x(tick), y.start, x(tick), y.stop))
        parts.append(f'<text x="{x(tick):.1f}" y="{y.start + 16:.1f}" text-anchor="middle">{panel.x.text(tick)}</text>')
    for tick in y.ticks():
        parts.append(_rule(x.start, y(tick), x.stop, y(tick)))
        parts.append(f'<text x="{x.start - 6:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{panel.y.text(tick)}</text>')
    if panel.x.log and any(value <= 0 for value in xs):
        parts.append(f'<text x="{x.start:.1f}" y="{y.start + 16:.1f}" text-anchor="middle">0</text>')
    parts.append(
        f'<text x="{middle:.1f}" y="{y.start + 34:.1f}" text-anchor="middle">{escape(panel.x.label)}</text>'
        f'<text x="{left + LEFT:.1f}" y="{top + TOP + 12:.1f}" dx="4" fill="#4a5568">{escape(panel.y.label)}</text>'
    )
    parts.append(f'<path d="M{x.start:.1f} {y.stop:.1f}V{y.start:.1f}H{x.stop:.1f}" fill="none" stroke="{INK}"/>')
    for line in sorted(panel.lines, key=lambda line: line.thick):  # thick ones last: on top
        places = [(x(a), y(b)) for a, b in line.points]
        parts.append(_stroke(places, line.style, 3.2 if line.thick else 1.8))
        every = max(1, ceil(len(places) / MOST_MARKERS))
        parts += [_marker(a, b, line.style) for a, b in places[::every]]
    return parts


def _heat_map(heat: HeatMap, left: float, top: float) -> list[str]:
    """Cells of one colour are one path, so that a picture of thousands stays small."""
    start, stop, upper, lower = left + LEFT, left + WIDTH - RIGHT, top + TOP, top + HEIGHT - BOTTOM
    width, height = (stop - start) / max(len(heat.cells[0]), 1), (lower - upper) / len(heat.cells)
    colours: dict[str, list[str]] = {}
    for row, values in enumerate(heat.cells):
        for column, value in enumerate(values):
            if value is not None:
                cell = (
                    f"M{start + column * width:.1f} {upper + row * height:.1f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
                )
                colours.setdefault(heat_colour(value, heat.most), []).append(cell)
    parts = [f'<text x="{start}" y="{upper - 12}" font-weight="bold">{escape(heat.title)}</text>']
    parts += [
        f'<path d="{"".join(cells)}" fill="{colour}" shape-rendering="crispEdges"/>'
        for colour, cells in sorted(colours.items())
    ]
    for row, name in enumerate(heat.rows):
        y = upper + (row + 0.5) * height + 4
        parts.append(f'<text x="{start - 6}" y="{y:.1f}" text-anchor="end" font-size="11">{escape(name)}</text>')
    first, last = heat.span
    for tick in [tick for tick in round_steps(first, max(last, first + 1)) if tick <= last]:
        x = start + (tick + 0.5 - first) / (last + 1 - first) * (stop - start)
        parts.append(f'<text x="{x:.1f}" y="{lower + 16:.1f}" text-anchor="middle">{heat.x.text(tick)}</text>')
    parts.append(
        f'<text x="{(start + stop) / 2:.1f}" y="{lower + 34:.1f}" text-anchor="middle">{escape(heat.x.label)}</text>'
        f'<text x="{left + 12}" y="{upper - 12}" fill="#4a5568">{escape(heat.y_label)}</text>'
    )
    return parts + _colour_key(heat.most, stop, lower + 25)  # beside the axis label: a title may be long


def _colour_key(most: float, right: float, top: float) -> list[str]:
    """The colours from 0 to `most`, right-aligned, with the numbers at both ends and 1 in the middle."""
    steps, size = 20, 5
    left = right - 30 - steps * size
    parts = []
    for step in range(steps):
        colour = heat_colour(step / (steps - 1) * most, most)
        parts.append(f'<rect x="{left + step * size:.1f}" y="{top}" width="{size}" height="10" fill="{colour}"/>')
    parts.append(f'<text x="{left - 5:.1f}" y="{top + 9}" text-anchor="end" font-size="11">0</text>')
    return [*parts, f'<text x="{right - 25:.1f}" y="{top + 9}" font-size="11">{most:g}+</text>']


# blue, near white, orange: told apart by colour-blind readers, and light only where a number is as it should be
_COLD, _EVEN, _HOT = (0x00, 0x4A, 0x80), (0xF2, 0xF2, 0xEC), (0xB8, 0x3B, 0x00)


def heat_colour(value: float, most: float) -> str:
    """`#rrggbb` of a number from 0 to `most` around 1.0, in 16 shades on either side."""
    share = (1.0 - value) if value < 1.0 else (value - 1.0) / (most - 1.0)
    share = round(min(max(share, 0.0), 1.0) * 16) / 16
    end = _COLD if value < 1.0 else _HOT
    return "#" + "".join(f"{round(even + share * (far - even)):02x}" for even, far in zip(_EVEN, end))


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float, spare: float) -> _Scale:
    """From the least to the largest number, `spare` of the span beyond them, never of no length."""
    shown = [value for value in values if value > 0] if axis.log else list(values)
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0)
    if axis.log:
        if high / low < 1.01:
            low, high = low / 2, high * 2
        if len(shown) < len(values):
            low /= max(1.3, (high / low) ** ROOM_FOR_ZERO)
        grow = (high / low) ** spare
        return _Scale(axis, low / grow, high * grow, start, stop)
    low = min(low, 0.0) if axis.from_zero else low
    least = LEAST_SPAN * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    return _Scale(axis, low - spare * (high - low), high + spare * (high - low), start, stop)


def _place(value: float, axis: Axis) -> float:
    return log10(value) if axis.log else value


def round_steps(low: float, high: float) -> list[float]:
    """At most six multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    rough = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = ceil(low / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, floor(high / step + 1e-9) + 1)]


def round_factors(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], thinned to six; with 2 and 5 times them where few are there."""
    powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    factors: Sequence[int] = (1,) if len(powers) > 3 else (1, 2, 5)
    ticks = [factor * power for power in powers for factor in factors if low <= factor * power <= high]
    if len(ticks) < 2:
        return round_steps(low, high)
    return ticks[:: ceil(len(ticks) / (MOST_TICKS + 2))]


def powers_of_two(low: float, high: float) -> list[float]:
    """At most six powers of two in [low, high], evenly far apart; of a range without two of them, round steps."""
    ticks = [2.0**power for power in range(ceil(log2(low)), floor(log2(high)) + 1)]
    return ticks[:: ceil(len(ticks) / MOST_TICKS)] if len(ticks) > 1 else round_steps(low, high)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID}"/>'


def _stroke(places: Sequence[tuple[float, float]], style: int, width: float = 1.8) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
    dash = DASHES[style // len(COLOURS) % len(DASHES)] or (DASHES[1] if style % 2 else "")
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{COLOURS[style % len(COLOURS)]}" stroke-width="{width}"{dashed}/>'


def _marker(x: float, y: float, style: int) -> str:
    colour, kind, r = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)], 3.4
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"/>'
    paths = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.1f} {y - r:.1f}l{r} {2 * r}h{-2 * r}z",
        "diamond": f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
    }
    if kind in paths:
        return f'<path d="{paths[kind]}" fill="{colour}"/>'
    cross = f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}M{x - r:.1f} {y + r:.1f}l{2 * r} {-2 * r}"
    return f'<path d="{cross}" stroke="{colour}" stroke-width="2"/>'
