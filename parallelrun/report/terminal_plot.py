"""Curves on a terminal: a letter per curve, legible without colour and in a log file. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2

from rich.text import Text

INKS = ("blue", "red", "green", "magenta", "yellow", "cyan", "white")
BLANK = " "


@dataclass(frozen=True)
class Curve:
    """letter: what its points are drawn with. bold: drawn over the others, and thicker."""

    letter: str
    label: str
    points: tuple[tuple[float, float], ...]
    bold: bool = False


def draw(
    curves: Sequence[Curve], width: int, rows: int, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> Text:
    """`rows` lines of at most `width` columns, both axes in factors, then the numbers below and the letters' meaning.

    Where curves meet, the first bold one is seen, else the first of all. Numbers must be above 0; no curve has none."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    low, high = min(ys), max(ys)
    if high / low < 1.01:
        low, high = low / 2, high * 2
    margin = max(len(y_text(y)) for y in (low, high, (low * high) ** 0.5)) + 1
    columns = max(16, width - margin - 1)
    cells: dict[tuple[int, int], int] = {}
    for index in sorted(range(len(curves)), key=lambda i: (curves[i].bold, -i)):
        for x, y in _filled(curves[index].points, min(xs), max(xs), columns):
            cells[rows - 1 - round(_share(y, low, high) * (rows - 1)), x] = index
    text = Text()
    for row in range(rows):
        value = low * (high / low) ** (1 - row / (rows - 1))
        shown = y_text(value) if row % ((rows - 1) // 2 or 1) == 0 else ""
        text.append(f"{shown:>{margin - 1}} |")
        for column in range(columns):
            index_here = cells.get((row, column))
            if index_here is None:
                text.append(BLANK)
            else:
                curve = curves[index_here]
                style = INKS[index_here % len(INKS)]
                text.append(curve.letter, f"bold {style}" if curve.bold else style)
        text.append("\n")
    text.append(f"{'':>{margin}}+{'-' * columns}\n{'':>{margin + 1}}{_numbers(sorted(set(xs)), columns, x_text)}\n")
    for index, curve in enumerate(curves):
        text.append(" " if index else "")
        text.append(f"{curve.letter} ", f"bold {INKS[index % len(INKS)]}")
        text.append(curve.label + ("; " if index + 1 < len(curves) else ""), "bold" if curve.bold else "")
    return text


def _share(value: float, low: float, high: float) -> float:
    return log2(value / low) / log2(high / low) if high > low else 0.0


def _filled(points: Sequence[tuple[float, float]], low: float, high: float, columns: int) -> list[tuple[int, float]]:
    """(column, height) of every column from the curve's first point to its last, straight in between."""
    places = [(_share(x, low, high) * (columns - 1), y) for x, y in points]
    found = [(round(place), y) for place, y in places]
    for (begin, y), (end, z) in pairwise(places):
        for column in range(round(begin) + 1, round(end)):
            share = (column - begin) / (end - begin)
            found.append((column, y * (z / y) ** share))
    return found


def _numbers(values: Sequence[float], columns: int, text: Callable[[float], str]) -> str:
    """Below the axis: as many of the values as have room, the first and the last among them."""
    line = [BLANK] * columns
    low, high = values[0], values[-1]

    def write(value: float) -> None:
        word = text(value)
        start = min(max(round(_share(value, low, high) * (columns - 1)) - len(word) // 2, 0), columns - len(word))
        around = line[max(0, start - 2) : start + len(word) + 2]
        if start >= 0 and not any(cell != BLANK for cell in around):
            line[start : start + len(word)] = word

    powers = [value for value in values if value == 2 ** round(log2(value))]
    for value in (low, high, *powers, *values):
        write(value)
    return "".join(line).rstrip()
