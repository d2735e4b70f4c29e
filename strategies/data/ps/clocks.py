"""The clock table of a parameter server: who has completed which step, and who may read. Pure and torch-free.

Ho et al. 2013 (stale synchronous parallel): a worker that has completed clock c may read when the slowest has completed
at least c - s. s=0 is a barrier; without a bound it is async. Workers that are through or lost hold nobody back.
"""

from __future__ import annotations

from collections.abc import Mapping


class Clocks:
    """completed: the clock of each worker's last push. The two sets only grow."""

    def __init__(self, start: Mapping[int, int]):
        self.completed = dict(start)
        self.through: set[int] = set()
        self.lost: set[int] = set()

    @property
    def live(self) -> set[int]:
        """Workers that are not lost."""
        return self.completed.keys() - self.lost

    @property
    def running(self) -> set[int]:
        """Workers that will push again."""
        return self.live - self.through

    @property
    def slowest(self) -> int | None:
        """The least clock of a running worker; None when none is."""
        return min((self.completed[worker] for worker in self.running), default=None)

    @property
    def gap(self) -> int:
        """How far the fastest running worker is ahead of the slowest."""
        clocks = [self.completed[worker] for worker in self.running]
        return max(clocks, default=0) - min(clocks, default=0)

    def tick(self, worker: int, clock: int) -> None:
        """`worker` has completed `clock`. Clocks only rise, and with backup workers some are skipped."""
        assert clock > self.completed[worker], f"worker {worker} pushed clock {clock} after {self.completed[worker]}"
        self.completed[worker] = clock

    def finish(self, worker: int) -> None:
        """`worker` pushes no more."""
        self.through.add(worker)

    def lose(self, worker: int) -> None:
        """`worker` is gone."""
        self.lost.add(worker)

    def may_read(self, worker: int, staleness: int | None) -> bool:
        """May `worker`, after its last push, have the weights? staleness None: always."""
        slowest = self.slowest
        return staleness is None or slowest is None or self.completed[worker] - staleness <= slowest
