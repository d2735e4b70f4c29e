"""Series for a figure: one result over a key, a line for each value of other keys. Pure functions of records.

Runs that differ only in the seed make one point: mean and standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import closest
from parallelrun.report.records.read import RunRecord
from parallelrun.report.records.run_differences import SEED, Column, Spread, differing_keys, spread_of


@dataclass(frozen=True)
class SeriesPoint:
    """x: a number, or a text such as the name of a precision; y: over the seeds."""

    x: float | str
    y: Spread


@dataclass(frozen=True)
class RunSeries:
    """One line: the runs whose values of `by` are in the label."""

    label: str
    points: tuple[SeriesPoint, ...]


def series(runs: Sequence[RunRecord], x: str, y: str, by: Sequence[str]) -> tuple[list[RunSeries], int]:
    """Return the lines, by the order of the runs, and the number of runs without `y`, which are left out.

    Raises ConfigError (exit 2) for a key that no run has, and for a point with runs that differ in more than the seed.
    """
    for key, flag in ((x, "--x"), *((name, "--by") for name in by)):
        if all(value_of(run, key) is None for run in runs):
            raise _unknown(key, flag, runs)
    shown = [run for run in runs if run.number(y) is not None and value_of(run, x) is not None]
    if not shown:
        raise _unknown(y, "--y", runs)
    runs_at: dict[str, dict[Any, list[RunRecord]]] = {}
    for run in shown:
        label = ", ".join(text(run, key) for key in by)
        runs_at.setdefault(label, {}).setdefault(value_of(run, x), []).append(run)
    lines = []
    for label, at in runs_at.items():
        points = [SeriesPoint(value, _spread(members, label, f"{x}={value}", y)) for value, members in at.items()]
        numeric = all(isinstance(point.x, (int, float)) for point in points)
        lines.append(RunSeries(label, tuple(sorted(points, key=lambda point: point.x) if numeric else points)))
    return lines, len(runs) - len(shown)


def value_of(run: RunRecord, key: str) -> Any:
    """Return a result, a value of the configuration, or the name of a group's option (`strategy`); None without one."""
    of_config = (run.config.get(name) for name in (key, f"{key}.preset", f"{key}.name"))
    for value in (run.results.get(key), *of_config):
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return value
        if value is not None:
            return str(value)
    return None


def text(run: RunRecord, key: str) -> str:
    """Return `ddp` for the strategy, and other keys with their names: `optimizer.lr=0.1`."""
    value = value_of(run, key)
    return str(value) if isinstance(value, str) else f"{key}={value}"


def _spread(members: list[RunRecord], label: str, place: str, y: str) -> Spread:
    others = [key for key in differing_keys(members) if key != SEED]
    others = [key.removesuffix(".name").removesuffix(".preset") for key in others]
    if others or len({run.config.get(SEED) for run in members}) < len(members):
        why = f"differ in {', '.join(others[:3])}" if others else "have the same seed"
        message = f"{len(members)} runs at {place}{f' of {label}' if label else ''} {why}"
        raise ConfigError(Problem(message, "--by", f"--by {others[0]} too" if others else "name the runs one by one"))
    spread = spread_of(Column(label, tuple(members)), y)
    assert spread is not None, "runs without the result are left out"
    return spread


def _unknown(key: str, flag: str, runs: Sequence[RunRecord]) -> ConfigError:
    names = {name for run in runs for name in run.results if run.number(name) is not None}
    names |= set() if flag == "--y" else {name for run in runs for name in run.config}
    near = closest(key, sorted(names))[:3]
    return ConfigError(Problem(f"{flag} {key}: no run has it", flag, " or ".join(near)))
