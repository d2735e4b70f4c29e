"""What the apply log says of a run as a whole: staleness, clock gap, drops, queue, rates. Pure and torch-free."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .log import Applied, Dropped


class Figures:
    """Adds up rows of the log as they come. Of several servers, the first one's updates are the run's."""

    def __init__(self) -> None:
        self.updates = 0
        self.skipped = 0
        self.staleness: Counter[int] = Counter()
        self.staleness_of: dict[int, Counter[int]] = {}
        self.dropped: Counter[int] = Counter()
        self.queue: Counter[int] = Counter()
        self.gap = 0
        self.seconds = 0.0

    def add(self, row: Applied | Dropped) -> None:
        """Count one row."""
        if row.server != 0:
            return
        if isinstance(row, Dropped):
            self.dropped[row.worker] += 1
            return
        self.updates += row.applied
        self.skipped += not row.applied
        for push, staleness in zip(row.pushes, row.staleness):
            self.staleness[staleness] += 1
            self.staleness_of.setdefault(push.worker, Counter())[staleness] += 1
        self.queue[row.queue] += 1
        self.gap = max(self.gap, row.gap)
        self.seconds = row.time_s

    def summary(self) -> dict[str, Any]:
        """The flat figures of summary.json."""
        return {
            "updates": self.updates,
            "updates_per_s": self.updates / self.seconds if self.seconds else None,
            "staleness_mean": _mean(self.staleness),
            "staleness_max": max(self.staleness, default=None),
            "clock_gap_max": self.gap,
            "dropped_gradients": self.dropped.total(),
            "server_queue_mean": _mean(self.queue),
            "server_queue_max": max(self.queue, default=None),
        }

    def document(self) -> dict[str, Any]:
        """The same with everything behind it, for servers.json."""
        return {
            **self.summary(),
            "skipped_updates": self.skipped,
            "staleness": _histogram(self.staleness),
            "staleness_of_worker": {w: _histogram(counts) for w, counts in sorted(self.staleness_of.items())},
            "staleness_mean_of_worker": {w: _mean(counts) for w, counts in sorted(self.staleness_of.items())},
            "dropped_of_worker": _histogram(self.dropped),
            "server_queue": _histogram(self.queue),
        }


def _histogram(counts: Counter[int]) -> dict[int, int]:
    return dict(sorted(counts.items()))


def _mean(counts: Counter[int]) -> float | None:
    total = counts.total()
    return sum(value * count for value, count in counts.items()) / total if total else None
