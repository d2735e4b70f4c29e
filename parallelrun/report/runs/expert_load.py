"""The load of every expert over the steps of a run, as a heat map on the terminal.

routing.jsonl is read line by line: of a long run only the map's cells are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.color import blend_rgb, parse_rgb_hex
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from parallelrun.report.figures import evenly
from parallelrun.report.records.routing_log import FILE
from parallelrun.report.screen import LABEL, WIDEST

COLD, EVEN, HOT = "004a80", "f2f2ec", "b83b00"  # below, at and above the mean load
MOST_LAYERS, MOST_ROWS = 4, 16
LEAST_WIDTH, MOST_WIDTH, MOST_BESIDE = 24, 64, 40  # columns of a map on the terminal; the last: of two side by side
SHADES = " .:-=+*#%@"  # of loads from 0 to MOST_LOAD, where there is no colour
MOST_LOAD = 2.0  # of the mean load: higher loads look the same
_STEP = re.compile(r'\{"schema": \d+, "step": (\d+), "layers": \[\{')  # reads the step without parsing the line


class LayerMap:
    """The load of one layer's experts over the mean load, averaged over the experts of a row and steps of a column."""

    def __init__(self, layer: str, experts: int, columns: int):
        self.layer, self.experts = layer, experts
        num_rows = min(experts, MOST_ROWS)
        self._bounds = [*pairwise(row * experts // num_rows for row in range(num_rows + 1))]
        self._sums = [[0.0] * columns for _ in self._bounds]
        self._steps = [0] * columns

    def add(self, column: int, layer: dict[str, Any]) -> None:
        """Add one step's record of this layer."""
        load = layer["load"]
        mean = sum(load) / len(load) or 1.0
        for sums, (start, stop) in zip(self._sums, self._bounds):
            sums[column] += sum(load[start:stop]) / (stop - start) / mean
        self._steps[column] += 1

    @property
    def cells(self) -> tuple[tuple[float | None, ...], ...]:
        """By row and column; 1.0 where the load is balanced, None where no step was written."""
        return tuple(
            tuple(total / count if count else None for total, count in zip(sums, self._steps)) for sums in self._sums
        )

    @property
    def row_labels(self) -> list[str]:
        """The experts of each row, such as `3` or `0-7`."""
        return [f"{a}" if b - a == 1 else f"{a}-{b - 1}" for a, b in self._bounds]


@dataclass(frozen=True)
class Maps:
    """The layers that are shown, of `num_layers`; their columns are equal parts of the steps first to last."""

    layers: tuple[LayerMap, ...]
    num_layers: int
    first: int
    last: int


def read(directory: Path, columns: int) -> Maps | None:
    """Return the maps of a run with at most `columns` columns; None without a step in routing.jsonl.

    Of more than four layers four are taken, evenly over the depth; experts share 16 rows where there are more.
    """
    steps = {int(match[1]) for line in _lines(directory) if (match := _STEP.match(line))}
    if not steps:
        return None
    first, last = min(steps), max(steps)
    columns = min(columns, len(steps))
    maps: list[LayerMap] = []
    for line in _lines(directory):
        if not _STEP.match(line):
            continue
        row = json.loads(line)
        layers, column = row["layers"], (row["step"] - first) * columns // (last + 1 - first)
        shown = [layers[index] for index in evenly(len(layers), MOST_LAYERS)]
        maps = maps or [LayerMap(layer["layer"], len(layer["load"]), columns) for layer in shown]
        for layer_map, layer in zip(maps, shown, strict=True):
            layer_map.add(column, layer)
    return Maps(tuple(maps), len(layers), first, last)


def _lines(directory: Path) -> Iterator[str]:
    """The complete lines: the last one of a run that was killed may be torn."""
    try:
        with (directory / FILE).open(encoding="utf-8") as file:
            yield from (line for line in file if line.endswith("}\n"))
    except FileNotFoundError:
        return


def panel(directory: Path, summary: dict[str, Any], console: Console) -> Group | None:
    """Return the heat maps of a finished run, side by side where there is room, below MaxVio from first to last."""
    screen = min(console.width, WIDEST)
    per_row = 2 if screen >= 2 * (LEAST_WIDTH + 16) else 1
    width = max(LEAST_WIDTH, min(MOST_BESIDE if per_row == 2 else MOST_WIDTH, (screen - 8) // per_row - 10))
    maps = read(directory, width)
    if maps is None:
        return None
    in_colour = console.color_system is not None and not console.no_color
    wide = max(1, min(3, width // len(maps.layers[0].cells[0])))  # characters of a column: few steps are drawn wider
    drawn = [_map_text(layer, maps, wide, in_colour) for layer in maps.layers]
    grid = Table.grid(padding=(0, 3))
    for start in range(0, len(drawn), per_row):
        grid.add_row(*drawn[start : start + per_row])
    return Group(_headline(summary, maps), grid, _key(in_colour))


def _headline(summary: dict[str, Any], maps: Maps) -> Text:
    text = Text.assemble(("experts".ljust(LABEL), "bold"))
    if summary.get("first_max_vio") is not None:
        dropped = f"{summary['drop_rate']:.1%} of assignments dropped" if summary["drop_rate"] else "nothing dropped"
        text.append(f"MaxVio {summary['first_max_vio']:.2f} -> {summary['max_vio']:.2f}, {dropped}, ")
        text.append(f"load entropy {summary['load_entropy']:.3f}")
    if maps.num_layers > len(maps.layers):
        text.append(f"; {len(maps.layers)} of {maps.num_layers} layers")
    return text


def _map_text(layer_map: LayerMap, maps: Maps, wide: int, in_colour: bool) -> Text:
    margin = max(map(len, layer_map.row_labels))
    text = Text(no_wrap=True).append(f"{layer_map.layer}\n", "bold")
    for label, row in zip(layer_map.row_labels, layer_map.cells):
        text.append(f"{label:>{margin}} ", "dim")
        for cell in row:
            text.append(*_cell(cell, wide, in_colour))
        text.append("\n")
    first, last, width = str(maps.first), str(maps.last), wide * len(layer_map.cells[0])
    return text.append(f"{'':>{margin}} {first}{last:>{max(width - len(first), len(last) + 1)}}", "dim")


def _cell(load: float | None, wide: int, in_colour: bool) -> tuple[str, str]:
    """Return `wide` characters for a load over the mean load, and their style."""
    if load is None or in_colour:
        return wide * " ", "" if load is None else f"on {heat_colour(load)}"
    return wide * SHADES[max(0, min(len(SHADES) - 1, int(load / MOST_LOAD * len(SHADES))))], ""


def heat_colour(load: float) -> str:
    """Return `#rrggbb` of a load over the mean load, in 16 shades below and above 1."""
    share = 1.0 - load if load < 1.0 else (load - 1.0) / (MOST_LOAD - 1.0)
    share = round(min(max(share, 0.0), 1.0) * 16) / 16
    return blend_rgb(parse_rgb_hex(EVEN), parse_rgb_hex(COLD if load < 1.0 else HOT), share).hex


def _key(in_colour: bool) -> Text:
    text = Text("load of each expert (rows) over the mean load, by step: ", "dim")
    for value in (0.0, 0.5, 1.0, 1.5, MOST_LOAD):
        quote = "" if in_colour else "'"
        text.append(quote).append(*_cell(value, 2 if in_colour else 1, in_colour))
        text.append(f"{quote} {value:g}{' or more' if value == MOST_LOAD else ''}  ", "dim")
    return text
