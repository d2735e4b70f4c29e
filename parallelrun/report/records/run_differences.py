"""Compares runs: what differs in what was asked for, and what came out. Pure functions of records.

Runs that differ only in the seed are replicates: they share a column, with mean and standard deviation.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallelrun.report.records.read import RunRecord

MISSING = object()  # the value of a key that a run does not have
SEED = "seed"
# Keys that do not change what a run computes, as in plan.freeze, and texts about other keys.
_VOLATILE = ("name", "runs", "detail", "plot", "verb", "tracker", "profile", "sweep", "timeout_s")
_OF_PRESETS = ("strategy.own_axis", "strategy.fill_order", "strategy.demo.", "strategy.searches")  # fill degrees
_VERSIONS = ("versions.", "code_sha256", "git.sha", "git.dirty", "platform", "hosts", "device", "cores")
_NOT_OF_A_PLAN = ("schema", "warnings", "filled", "layouts", "data_axis")  # texts, and tables of other plans


@dataclass(frozen=True)
class Column:
    """Runs that differ at most in the seed. label: A, B, ...; name: the label and what a page calls the runs."""

    label: str
    runs: tuple[RunRecord, ...]
    name: str = ""

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get(SEED) for run in self.runs]


@dataclass(frozen=True)
class KeyDifference:
    """One key whose values are not the same in all columns; MISSING where a column does not have it."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: over count - 1; None for one run) of a result over replicates."""

    mean: float
    deviation: float | None
    count: int


@dataclass(frozen=True)
class MeasureRow:
    """One result: its spread by column, None where it was not recorded; changes: relative to the first column."""

    key: str
    values: tuple[Spread | None, ...]

    @property
    def changes(self) -> tuple[float | None, ...]:
        base = self.values[0]
        return tuple(relative(value.mean, base.mean) if value and base else None for value in self.values)


@dataclass(frozen=True)
class LossDifference:
    """How a column's training losses differ from the first column's, over the steps that both have.

    first_step: the first step at which they are not the same number (None: all are the same), by `first`; largest: at
    `largest_step`; last: at `last_step`, the last common one. Differences have a sign: this column less the first one.
    """

    label: str
    num_common: int
    first_step: int | None = None
    first: float = 0.0
    first_relative: float = 0.0
    largest_step: int = 0
    largest: float = 0.0
    last_step: int = 0
    last: float = 0.0


@dataclass(frozen=True)
class RunComparison:
    """The whole comparison. The first column is the baseline."""

    columns: tuple[Column, ...]
    config: tuple[KeyDifference, ...]
    plan: tuple[KeyDifference, ...]
    versions: tuple[KeyDifference, ...]
    measures: tuple[MeasureRow, ...]
    losses: tuple[LossDifference, ...]
    over_seeds: Mapping[str, Spread]  # by result, over all runs, if they differ in nothing but the seed


def compare(runs: Sequence[RunRecord]) -> RunComparison:
    """Return the comparison of at least two runs with the first one."""
    columns = columns_of(runs)
    everything = Column("all", tuple(runs))
    replicates = len({_identity(run) for run in runs}) == 1 and len(set(everything.seeds)) == len(runs)
    heads = [column.runs[0] for column in columns]
    keys = dict.fromkeys(key for run in runs for key in run.results)
    measures = [MeasureRow(key, tuple(spread_of(column, key) for column in columns)) for key in keys]
    return RunComparison(
        columns=columns,
        config=_differences([_configuration(run) for run in heads], replicated=len(columns) < len(runs)),
        plan=_differences([_without(run.plan, _NOT_OF_A_PLAN) for run in heads]),
        versions=_differences([_only(run.manifest, _VERSIONS) for run in heads]),
        measures=tuple(row for row in measures if any(row.values)),
        losses=tuple(_loss_difference(columns[0], column) for column in columns[1:]),
        over_seeds={key: spread for key in keys if (spread := spread_of(everything, key))} if replicates else {},
    )


def relative(value: float, base: float) -> float:
    """Return the change from `base` to `value` over the size of `base`; infinite if only `base` is 0."""
    if value == base:
        return 0.0
    return (value - base) / abs(base) if base else float("inf") if value > base else float("-inf")


def label(index: int) -> str:
    """A to Z, then A2, B2, ..."""
    letter, times = chr(ord("A") + index % 26), index // 26
    return f"{letter}{times + 1}" if times else letter


def columns_of(runs: Sequence[RunRecord]) -> tuple[Column, ...]:
    """Return the runs, with replicates grouped, unless two have the same seed or there would be one column."""
    replicates: dict[str, list[RunRecord]] = {}
    for run in runs:
        replicates.setdefault(_identity(run), []).append(run)
    groups = []
    for members in replicates.values():
        seeds = {member.config.get(SEED) for member in members}
        is_split = len(seeds) < len(members) or len(replicates) == 1
        groups += [[member] for member in members] if is_split else [members]
    return tuple(Column(label(index), tuple(members)) for index, members in enumerate(groups))


def _identity(run: RunRecord) -> str:
    """Return a key that replicates share: versions, and the configuration without the seed."""
    config = {key: value for key, value in _configuration(run).items() if key != SEED}
    if not config:
        return str(run.directory)
    return json.dumps([config, _only(run.manifest, _VERSIONS)], sort_keys=True, default=str)


def _configuration(run: RunRecord) -> dict[str, Any]:
    """Return the keys of the configuration that decide what is computed."""
    config = _without(run.config, _VOLATILE)
    others = [key for key in config if key.endswith(".description") or key.startswith(_OF_PRESETS)]
    return {key: value for key, value in config.items() if key not in others}


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Return the keys of the configuration whose values are not the same in all runs."""
    return [row.key for row in _differences([_configuration(run) for run in runs])]


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key.partition(".")[0] not in names}


def _only(values: Mapping[str, Any], prefixes: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key.startswith(tuple(prefixes))}


def _differences(values: Sequence[Mapping[str, Any]], replicated: bool = False) -> tuple[KeyDifference, ...]:
    """Return the keys that differ. replicated: the seed is no difference, because columns have several."""
    keys = dict.fromkeys(key for row_values in values for key in row_values)
    rows = [KeyDifference(key, tuple(row_values.get(key, MISSING) for row_values in values)) for key in keys]
    return tuple(
        row for row in rows
        if any(value != row.values[0] for value in row.values) and not (replicated and row.key == SEED)
    )  # fmt: skip


def spread_of(column: Column, key: str) -> Spread | None:
    """Return the spread of a result; None unless every run of the column has it as a number."""
    values = [run.number(key) for run in column.runs]
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return None
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(statistics.fmean(numbers), deviation, len(numbers))


def losses(column: Column) -> dict[int, float]:
    """Return the training loss by step, the mean over replicates; only steps that all of them have.

    A loss that was not finite (null) is NaN.
    """
    of_runs = [{row["step"]: math.nan if row["loss"] is None else row["loss"] for row in run.rows if "loss" in row}
               for run in column.runs]  # fmt: skip
    common = set.intersection(*(set(of_run) for of_run in of_runs))
    return {step: statistics.fmean(losses_of_run[step] for losses_of_run in of_runs) for step in sorted(common)}


def _difference(base: float, value: float) -> float:
    """Infinite where only one of the two is finite, 0 where neither is."""
    if math.isnan(base) or math.isnan(value):
        return 0.0 if math.isnan(base) and math.isnan(value) else math.inf
    return value - base


def _loss_difference(base: Column, column: Column) -> LossDifference:
    first, second = losses(base), losses(column)
    differences = {step: _difference(value, second[step]) for step, value in first.items() if step in second}
    if not differences:
        return LossDifference(column.label, 0)
    unequal = next((step for step, difference in differences.items() if difference != 0.0), None)
    largest, last = max(differences, key=lambda step: abs(differences[step])), max(differences)
    by, size = (0.0, math.inf) if unequal is None else (differences[unequal], abs(first[unequal]))
    part = (unequal, by, by / size if size > 0 else math.inf)
    return LossDifference(column.label, len(differences), *part, largest, differences[largest], last, differences[last])
