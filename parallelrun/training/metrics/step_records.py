"""The results of steps: those of this attempt, rows that earlier ones have written, and medians of their times."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelrun.report.records import attempts
from parallelrun.report.records.read import METRICS, read_rows
from parallelrun.training.metrics.timing import StepTimes

FIRST_TIMED_STEP = 3  # steps 1 and 2 are slower: set-up, counting


@dataclass(frozen=True)
class StepRecord:
    """The results of one step. Times in seconds; step_time_s excludes evaluation and saving.

    times: None if another rank took the step. more: additional fields of its row in metrics.jsonl.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    applied: bool
    step_time_s: float
    time_s: float
    val_loss: float | None
    loss_scale: float
    times: StepTimes | None
    val_top1: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EarlierRows:
    """The rows of metrics.jsonl of the steps before this attempt; none in a run that had no others."""

    rows: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, directory: Path) -> EarlierRows:
        """Read those of a run directory. Raises ParallelrunError for a broken file."""
        return cls(read_rows(directory / METRICS)) if len(attempts.read(directory)) > 1 else cls()

    def values(self, key: str) -> list[float]:
        """Return the values of a key, in the order of the steps."""
        return [row[key] for row in self.rows if row.get(key) is not None]

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def time_s(self) -> float:
        """The training time of those steps."""
        return float(self.rows[-1].get("time_s") or 0.0) if self.rows else 0.0


def timed(records: Iterable[StepRecord], profiled: Container[int]) -> list[StepRecord]:
    """Return the steps whose times count; all steps if there is no such step. The profiler slows a step down."""
    return [r for r in records if r.step >= FIRST_TIMED_STEP and r.step not in profiled] or list(records)


def percentile_95(ordered: list[float]) -> float:
    """Return the 95th percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def median_times(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return one rank's medians over steps of its StepTimes, and of bubble_s / step_time_s as `bubble_measured`."""
    rows = [{**r.times.fields, "step_time_s": r.step_time_s} for r in records if r.times is not None]
    for row in rows:
        seconds = row.pop("step_time_s")
        if "bubble_s" in row:
            row["bubble_measured"] = row["bubble_s"] / seconds
    names = dict.fromkeys(name for row in rows for name in row)  # on CUDA some steps have more parts than others
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def mean_times(everyone: list[dict[str, float]]) -> dict[str, float | None]:
    """Return the mean over ranks of their medians, None for fields that were not timed.

    `bubble_measured` is the fraction of a step in which a rank idles for other stages (see StepTimes.bubble_s). Unlike
    it, `bubble_predicted` ignores the time of messages and everything after the schedule.
    """
    measured = [medians for medians in everyone if medians]  # servers take no steps
    names = ("compute_s", "comm_exposed_s", "bubble_s", "data_s", "optimizer_s", "bubble_measured")
    first = measured[0] if measured else {}
    return {name: statistics.fmean(medians[name] for medians in measured) if name in first else None for name in names}
