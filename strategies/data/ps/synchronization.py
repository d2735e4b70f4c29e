"""When workers may go on: the clock table of stale synchronous parallel, and barriers. Pure, without threads."""

from __future__ import annotations

from collections.abc import Mapping, Set


class WorkerClocks:
    """The last step that each worker has pushed, and the workers that push no more.

    Ho et al. 2013: a worker that has completed clock c may read when the slowest has completed at least c - staleness.
    Staleness 0 is a barrier; without a bound it is async. Finished and lost workers hold nobody back.
    """

    def __init__(self, start: Mapping[int, int]):
        self.completed = dict(start)
        self.finished: set[int] = set()
        self.lost: set[int] = set()

    @property
    def live(self) -> set[int]:
        """Workers that are not lost."""
        return self.completed.keys() - self.lost

    @property
    def running(self) -> set[int]:
        """Workers that will push again."""
        return self.live - self.finished

    @property
    def slowest(self) -> int | None:
        """The lowest clock of a running worker; None if no worker is running."""
        return min((self.completed[worker] for worker in self.running), default=None)

    @property
    def gap(self) -> int:
        """Clocks by which the fastest running worker is ahead of the slowest."""
        clocks = [self.completed[worker] for worker in self.running]
        return max(clocks, default=0) - min(clocks, default=0)

    def tick(self, worker: int, clock: int) -> None:
        """Note that `worker` has completed `clock`. With backup workers a late one skips clocks."""
        assert clock > self.completed[worker], f"worker {worker} pushed clock {clock} after {self.completed[worker]}"
        self.completed[worker] = clock

    def may_read(self, worker: int, staleness: int | None) -> bool:
        """Whether `worker` may have the weights after its last push. staleness None: always."""
        slowest = self.slowest
        return staleness is None or slowest is None or self.completed[worker] - staleness <= slowest


class Barrier:
    """A reusable barrier.

    waiting: the ranks that have arrived since the last release. final: one of them will not arrive again.
    failed_step: of a checkpoint that was not written before the last release, else 0.
    """

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self.final = False
        self.failed_step = 0

    def arrive(self, rank: int, final: bool) -> None:
        self.waiting.add(rank)
        self.final = self.final or final

    def is_complete(self, expected: Set[int]) -> bool:
        return bool(self.waiting) and self.waiting >= expected

    def release(self, failed_step: int) -> None:
        self.waiting.clear()
        self.final, self.failed_step = False, failed_step
