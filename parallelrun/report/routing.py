"""The load of every expert over the steps of a run, as a heat map: on the terminal, and as routing.svg.

Drawn from routing.jsonl alone, which is read in one pass: of a long run only the bins of the map are kept. Torch-free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parallelrun.records import write_text
from parallelrun.report import chart
from parallelrun.report.figures import digits
from parallelrun.report.screen import WIDEST
from parallelrun.routing_log import FILE

PICTURE = "routing.svg"
MOST_LAYERS, MOST_ROWS = 4, 16
SHADES = " .:-=+*#%@"  # of loads from 0 to MOST_LOAD, where there is no colour
MOST_LOAD = 2.0  # of the mean load: more looks alike
_STEP = re.compile(r'\{"schema": \d+, "step": (\d+), "layers": \[\{')  # of a line, without parsing all of it
LEAST_WIDTH = 24  # of a map on the terminal, without its labels


@dataclass(frozen=True)
class LayerMap:
    """One layer over a run. cells[row][column]: load over the mean load, 1.0 where balanced, averaged over the experts
    of a row and the steps of a column; None where no step was written. max_vio: per column."""

    layer: str
    experts: int
    cells: tuple[tuple[float | None, ...], ...]
    max_vio: tuple[float | None, ...]


@dataclass(frozen=True)
class Maps:
    """Those of the layers that are shown, of `num_layers`; columns are equal parts of [first, last] in steps."""

    layers: tuple[LayerMap, ...]
    num_layers: int
    first: int
    last: int

    def step_of(self, column: int, columns: int) -> float:
        """The middle of a column."""
        return self.first + (column + 0.5) * (self.last + 1 - self.first) / columns - 0.5


def read(directory: Path, columns: int) -> Maps | None:
    """The maps of a run with at most `columns` columns; None without routing.jsonl or with nothing in it.

    Of more than four layers four are taken, evenly over the depth; experts share 16 rows where there are more.
    """
    steps = [int(found[1]) for line in _lines(directory) if (found := _STEP.match(line))]
    if not steps:
        return None
    first, last = min(steps), max(steps)
    columns = min(columns, len(set(steps)))
    bins: list[_Bins] = []
    num_layers = 0
    for row in _rows(directory):
        layers = row["layers"]
        num_layers = len(layers)
        chosen = evenly(num_layers, MOST_LAYERS)
        bins = bins or [_Bins(layers[i]["layer"], len(layers[i]["load"]), columns) for i in chosen]
        column = (row["step"] - first) * columns // (last + 1 - first)
        for index, one in zip(chosen, bins, strict=True):
            one.add(column, layers[index])
    return Maps(tuple(one.map() for one in bins), num_layers, first, last)


class _Bins:
    """Sums of one layer's load, by row and column."""

    def __init__(self, layer: str, experts: int, columns: int):
        self._layer, self._experts = layer, experts
        self._rows = min(experts, MOST_ROWS)
        self._sums = [[0.0] * columns for _ in range(self._rows)]
        self._vio = [0.0] * columns
        self._steps = [0] * columns

    def add(self, column: int, layer: dict[str, Any]) -> None:
        load = layer["load"]
        mean = sum(load) / len(load) or 1.0
        for row in range(self._rows):
            start, stop = (bound * self._experts // self._rows for bound in (row, row + 1))
            self._sums[row][column] += sum(load[start:stop]) / (stop - start) / mean
        self._vio[column] += layer["max_vio"]
        self._steps[column] += 1

    def map(self) -> LayerMap:
        cells = tuple(self._means(row) for row in self._sums)
        return LayerMap(self._layer, self._experts, cells, self._means(self._vio))

    def _means(self, sums: list[float]) -> tuple[float | None, ...]:
        return tuple(total / count if count else None for total, count in zip(sums, self._steps))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` indices, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _rows(directory: Path) -> Iterator[dict[str, Any]]:
    """The steps that were written, one at a time."""
    return (json.loads(line) for line in _lines(directory) if _STEP.match(line))


def _lines(directory: Path) -> Iterator[str]:
    """Whole lines: the last one of a run that was killed may be torn."""
    try:
        with (directory / FILE).open(encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("}\n"))
    except FileNotFoundError:
        return


# --- terminal ---------------------------------------------------------------------------------------------------------


def panel(directory: Path, summary: dict[str, Any], console: Console) -> Group | None:
    """The heat maps of a finished run, side by side where there is room, under MaxVio from first to last."""
    screen = min(console.width, WIDEST)
    side_by_side = screen >= 2 * (LEAST_WIDTH + 16)
    width = (screen - 8) // (2 if side_by_side else 1) - 10
    width = max(LEAST_WIDTH, min(40 if side_by_side else 64, width))
    maps = read(directory, width)
    if maps is None:
        return None
    in_colour = console.color_system is not None and not console.no_color
    grid = Table.grid(padding=(0, 3))
    wide = max(1, min(3, width // len(maps.layers[0].cells[0])))  # characters of a column: few steps are drawn wider
    drawn = [_map_text(one, maps, wide, in_colour) for one in maps.layers]
    per_row = 2 if side_by_side else 1
    for start in range(0, len(drawn), per_row):
        grid.add_row(*drawn[start : start + per_row])
    return Group(_headline(summary, maps), grid, _key(maps, in_colour))


def _headline(summary: dict[str, Any], maps: Maps) -> Text:
    text = Text.assemble(("experts   ", "bold"))
    if summary.get("first_max_vio") is not None:
        dropped = f"{summary['drop_rate']:.1%} of assignments dropped" if summary["drop_rate"] else "nothing dropped"
        text.append(
            f"MaxVio {summary['first_max_vio']:.2f} -> {summary['max_vio']:.2f}, {dropped}, "
            f"load entropy {summary['load_entropy']:.3f}"
        )
    if maps.num_layers > len(maps.layers):
        text.append(f"; {len(maps.layers)} of {maps.num_layers} layers")
    return text


def _map_text(one: LayerMap, maps: Maps, wide: int, in_colour: bool) -> Text:
    labels = _row_labels(one)
    margin = max(map(len, labels))
    text = Text(no_wrap=True)
    text.append(f"{one.layer}\n", "bold")
    for label, row in zip(labels, one.cells):
        text.append(f"{label:>{margin}} ", "dim")
        for cell in row:
            if cell is None:
                text.append(wide * " ")
            elif in_colour:
                text.append(wide * " ", f"on {chart.heat_colour(cell, MOST_LOAD)}")
            else:
                text.append(wide * shade(cell))
        text.append("\n")
    width = wide * len(one.cells[0])
    last = str(maps.last)
    text.append(f"{'':>{margin}} {maps.first}{last:>{max(width - len(str(maps.first)), len(last) + 1)}}", "dim")
    return text


def shade(load: float) -> str:
    """The character of a load over the mean load."""
    return SHADES[max(0, min(len(SHADES) - 1, int(load / MOST_LOAD * len(SHADES))))]


def _row_labels(one: LayerMap) -> list[str]:
    rows = len(one.cells)
    bounds = [row * one.experts // rows for row in range(rows + 1)]
    return [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in pairwise(bounds)]


def _key(maps: Maps, in_colour: bool) -> Text:
    text = Text("load of each expert (rows) over steps, by its mean: ", "dim")
    for value in (0.0, 0.5, 1.0, 1.5, MOST_LOAD):
        if in_colour:
            text.append("  ", f"on {chart.heat_colour(value, MOST_LOAD)}")
        else:
            text.append(f"'{shade(value)}'")
        text.append(f" {value:g}{' or more' if value == MOST_LOAD else ''}  ", "dim")
    return text


# --- picture ----------------------------------------------------------------------------------------------------------


def write(directory: Path) -> Path | None:
    """routing.svg in a run directory: a heat map per layer and MaxVio over steps; nothing where there is no routing."""
    maps = read(directory, columns=60)
    if maps is None:
        return None
    write_text(directory / PICTURE, to_svg(maps))
    return directory / PICTURE


def to_svg(maps: Maps) -> str:
    """The picture."""
    step = chart.Axis("step", digits)
    panels: list[chart.Panel | chart.HeatMap] = [
        chart.HeatMap(
            one.layer,
            one.cells,
            tuple(_row_labels(one)),
            "expert",
            chart.Axis("step", digits),
            (maps.first, maps.last),
            MOST_LOAD,
        )
        for one in maps.layers
    ]
    lines = []
    for style, one in enumerate(maps.layers):
        points = [(maps.step_of(i, len(one.max_vio)), v) for i, v in enumerate(one.max_vio) if v is not None]
        lines.append(chart.Line(style, tuple(points)))
    panels.append(
        chart.Panel("MaxVio: largest load over mean load, less 1", step, chart.Axis("", digits, from_zero=True),
                    tuple(lines))
    )  # fmt: skip
    notes = ["colour: load of an expert over the mean load of its layer, before any token is dropped; 1 is balanced"]
    if maps.num_layers > len(maps.layers):
        notes.append(f"{len(maps.layers)} of {maps.num_layers} layers with experts; {FILE} has all")
    return chart.draw("load of experts over the run", panels, [one.layer for one in maps.layers], notes)
