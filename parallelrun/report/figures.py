"""Figures for people: counts, bytes, FLOPs, seconds, degrees. One way of writing each, on every screen."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV; the first one has the names of the columns."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


ROUNDING = 1e-6  # relative: numbers of fp32 sums that differ by less are equal but for the order of adding


def digits(number: float, significant: int = 3) -> str:
    """Three significant digits, never in powers of ten: 0.00123, 1.23, 123, 1234. Ticks may need more."""
    if abs(number) >= 10**significant - 0.5:
        return f"{number:.0f}"
    return f"{number:.{significant}g}" if abs(number) >= 1e-4 or not number or significant > 3 else "0.0001"


def tick_texts(ticks: Sequence[float], text: Callable[[float, int], str]) -> list[str]:
    """Return the ticks of an axis by `text(value, significant digits)`, with so many digits that they are told apart,
    and are exact where round."""
    distinct: list[str] = []
    for significant in range(3, 16):
        texts = [text(value, significant) for value in ticks]
        if len(set(texts)) == len(set(ticks)):
            if texts == [text(value, significant + 2) for value in ticks]:
                return texts
            distinct = distinct or texts
    return distinct or texts


def drawn_range(low: float, high: float) -> tuple[float, float]:
    """Return the numbers between which an axis is drawn: wider than the data where these are equal within rounding, or
    nearly so, because what rounding changes is nothing to see."""
    size, span = max(abs(low), abs(high)), high - low
    least = (0.2 if span <= ROUNDING * size else 100 * ROUNDING) * (size or 10.0)
    middle = low + span / 2
    return (low, high) if span >= least else (middle - least / 2, middle + least / 2)


def count_text(count: float) -> str:
    """A count for people: 175 B."""
    return _scaled(count, ("", " k", " M", " B", " T"))


def _scaled(count: float, units: Sequence[str]) -> str:
    """Return a number in the unit, each 1,000 times the one before, in which it has at most three digits."""
    index = 0
    while index < len(units) - 1 and abs(count) >= 999.5:
        count, index = count / 1000, index + 1
    return f"{digits(count)}{units[index]}"


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points, each the mean of as many neighbours."""
    size = -(-len(points) // most) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, the first and the last included."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def byte_unit(largest: float) -> tuple[str, int]:
    """(name, bytes) of the unit in which `largest` has at most three digits before the point."""
    index = 0
    while index < len(BYTE_UNITS) - 1 and largest / 1024**index >= 999.5:
        index += 1
    return BYTE_UNITS[index], 1024**index


def bytes_text(count: float, significant: int = 3) -> str:
    """A byte count for people: 1.5 MiB."""
    unit, size = byte_unit(abs(count))
    return f"{digits(count / size, significant)} {unit}"


def flops_text(count: float) -> str:
    """FLOPs for people: 12.3 TFLOP."""
    return _scaled(count, [f" {unit}FLOP" for unit in ("", "k", "M", "G", "T", "P", "E")])


def seconds_text(seconds: float, significant: int = 3) -> str:
    """3.1 ms, 12 s, 1130 s."""
    return f"{digits(seconds * 1e3, significant)} ms" if seconds < 0.9995 else f"{digits(seconds, significant)} s"


def degrees_text(degrees: Mapping[str, int]) -> str:
    """The axes that have more than one rank: `tp=2 pp=2`, or `one rank`."""
    return " ".join(f"{axis}={size}" for axis, size in degrees.items() if size > 1) or "one rank"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0 1 2 3`, or `0 to 63` where many are consecutive, or the first few: `0 8 16 .. 504 (64 ranks)`."""
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return f"{ranks[0]} {ranks[1]} {ranks[2]} .. {ranks[-1]} ({len(ranks)} ranks)"
