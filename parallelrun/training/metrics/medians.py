"""Medians of the times of a run's steps: over the steps of a rank, then over ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from parallelrun.training.loop.step_record import StepRecord


def percentile_95(ordered: list[float]) -> float:
    """Return the 95th percentile of sorted values."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def median_times(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return one rank's medians over steps of its StepTimes, and of bubble_s / step_time_s as `bubble_measured`."""
    timed = [(record.times, record.step_time_s) for record in records if record.times is not None]
    rows = [
        {**times.fields, "bubble_measured": times.bubble_s / seconds} if times.bubble_s is not None else times.fields
        for times, seconds in timed
    ]
    names = dict.fromkeys(name for row in rows for name in row)  # on CUDA some steps have more parts than others
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def mean_times(everyone: list[dict[str, float]]) -> dict[str, float | None]:
    """Return the mean over ranks of their medians, None for fields that were not timed.

    `bubble_measured` is the fraction of a step in which a rank idles for other stages (see StepTimes.bubble_s). Unlike
    it, `bubble_predicted` ignores the time of messages and everything after the schedule.
    """
    timed = [medians for medians in everyone if medians]  # servers take no steps
    names = ("compute_s", "comm_exposed_s", "bubble_s", "data_s", "optimizer_s", "bubble_measured")
    measured = timed[0] if timed else {}
    return {name: statistics.fmean(medians[name] for medians in timed) if name in measured else None for name in names}
