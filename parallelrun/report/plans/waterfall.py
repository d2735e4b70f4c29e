"""The parts of a predicted step as a waterfall: bars of one plan, columns of several, and why one beats another.

Figures add up as they are printed: what rounding takes from one part, another gets (largest remainders).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10

from rich.table import Table

from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.report.screen import table

BLOCKS = " ▏▎▍▌▋▊▉█"  # eighths of a column
DIGITS = 4  # significant ones of a step's time
MOST_DIFFERENCES, SMALL = 4, 0.05  # differences that are named, at least this part of the largest


def parts_of(times: Sequence[StepTime]) -> list[str]:
    """The names of all parts, in the order in which the first plan that has one names it."""
    return list(dict.fromkeys(name for time in times for name in time.parts))


def unit_of(longest: float) -> tuple[str, float, int]:
    """(unit, seconds of it, digits after the point) in which `longest` seconds have DIGITS significant digits."""
    unit, size = ("s", 1.0) if longest >= 1 else ("ms", 1e-3)
    before = floor(log10(longest / size)) + 1 if longest > 0 else 1
    return unit, size, max(0, DIGITS - max(1, before))


def rounded(values: Sequence[float], num_digits: int) -> list[float]:
    """The values with `num_digits` digits after the point, so that they add up to their rounded sum."""
    scale = 10.0**num_digits
    floors = [floor(value * scale) for value in values]
    missing = round(sum(values) * scale) - sum(floors)
    by_remainder = sorted(range(len(values)), key=lambda index: floors[index] - values[index] * scale)
    for index in by_remainder[:missing]:
        floors[index] += 1
    return [number / scale for number in floors]


def columns(times: Sequence[StepTime], unit: tuple[str, float, int]) -> list[tuple[str, list[str]]]:
    """(part, its figure in each plan) and last the sum. A part that no plan shows in the unit's digits is left out."""
    _, size, num_digits = unit
    names = parts_of(times)
    figures = [rounded([time.parts.get(name, 0.0) / size for name in names], num_digits) for time in times]
    rows = [(name, [f"{column[index]:.{num_digits}f}" if times[plan].parts.get(name) else "-"
                    for plan, column in enumerate(figures)]) for index, name in enumerate(names)]  # fmt: skip
    return [*rows, ("step", [f"{sum(column):.{num_digits}f}" for column in figures])]


def bars(time: StepTime, width: int) -> Table:
    """One line per part: seconds, share, and a bar that begins where the one before it ends. width: of the bars."""
    unit, size, num_digits = unit_of(time.step_s)
    values = rounded([seconds / size for seconds in time.parts.values()], num_digits)
    drawn = table("part", f">{unit}", ">share", "", rule=False, padding=(0, 2, 0, 0))
    done = 0.0
    for (name, seconds), value in zip(time.parts.items(), values):
        share = seconds / time.step_s
        drawn.add_row(name, f"{value:.{num_digits}f}", f"{share:.0%}", _bar(done, done + share, width))
        done += share
    drawn.add_row("step", f"{sum(values):.{num_digits}f}", "100%", _bar(0.0, 1.0, width), style="bold")
    return drawn


def _bar(begin: float, end: float, width: int) -> str:
    """A bar from one part of the width to another, in eighths of a column at its end; at least one eighth long."""
    first = min(int(begin * width), width - 1)
    eighths = max(1, round((end * width - first) * 8))
    return " " * first + BLOCKS[-1] * (eighths // 8) + BLOCKS[eighths % 8].strip()


def differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[tuple[str, float]]:
    """(part, seconds that ours takes beyond theirs), the largest first; without parts that are equal."""
    names = dict.fromkeys([*ours, *theirs])
    pairs = [(name, ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in names]
    return sorted((pair for pair in pairs if pair[1]), key=lambda pair: -abs(pair[1]))


def why(ours: StepTime, theirs: StepTime) -> str:
    """`0.41 s faster (tensor communication -0.62 s, bubble +0.21 s)`: how ours differs, the largest part first."""
    gained = theirs.step_s - ours.step_s
    parts = differences(ours.parts, theirs.parts)
    if not parts:
        return "equally fast"
    unit, size, num_digits = unit_of(max(abs(gained), abs(parts[0][1])))
    num_digits = max(0, num_digits - 1)
    named = [part for part in parts[:MOST_DIFFERENCES] if abs(part[1]) >= SMALL * abs(parts[0][1])]
    others = -gained - sum(seconds for _, seconds in named)
    named += [("others", others)] if abs(others) >= SMALL * abs(parts[0][1]) else []
    listed = ", ".join(f"{name} {seconds / size:+.{num_digits}f} {unit}" for name, seconds in named)
    verdict = "faster" if gained >= 0 else "slower"
    return f"{abs(gained) / size:.{num_digits}f} {unit} {verdict} ({listed})"
