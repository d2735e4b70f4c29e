"""When workers may go on: the clock table of stale synchronous parallel, and barriers. Pure, torch-free, no threads."""

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
    """A reusable barrier that runs an action when all expected workers have arrived.

    A worker arrives, polls until the barrier is released, and fetches the result once. final: one of the workers that
    have arrived has announced that it will not arrive again.
    """

    def __init__(self) -> None:
        self._arrived: set[int] = set()
        self._results: dict[int, int] = {}  # of a released barrier, not fetched yet
        self.final = False

    def arrive(self, worker: int, final: bool) -> None:
        """Note that `worker` is here, or polls again."""
        if worker not in self._results:
            self._arrived.add(worker)
            self.final = self.final or final

    def is_complete(self, expected: Set[int]) -> bool:
        """Whether all expected workers have arrived. False if none has."""
        return bool(self._arrived) and self._arrived >= expected

    def release(self, succeeded: bool) -> None:
        """Let the workers that have arrived go on, and tell them how the action ended."""
        self._results |= dict.fromkeys(self._arrived, 1 if succeeded else -1)
        self._arrived.clear()
        self.final = False

    def is_waiting(self, worker: int) -> bool:
        """Whether `worker` has arrived and has not been released since."""
        return worker in self._arrived

    def fetch(self, worker: int) -> int:
        """Return 1 (released), -1 (released, the action failed) or 0 (not yet). A release is reported once."""
        return self._results.pop(worker, 0)
