"""What has been submitted to be reduced, and what is waited for: the facts that timeline and stall warning tell."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from parallelrun.comm import Waitable

if TYPE_CHECKING:
    from .timeline import Timeline


class Submissions:
    """One rank's exchanges of the current step, in their order, which is the same on all ranks.

    step: from 1. num_submitted, num_done: exchanges of this step. Another thread may read all of it at any time.
    """

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []
        self.timeline: Timeline | None = None
        self.step = 0
        self.num_submitted = 0
        self.num_done = 0
        self.waiting_since: float | None = None

    def add(self, names: tuple[str, ...]) -> int:
        """Announce an exchange of those tensors; its number."""
        self.names.append(names)
        return len(self.names) - 1

    def begin_step(self) -> None:
        """Nothing has been submitted in this step."""
        self.num_submitted = self.num_done = 0
        self.step += 1
        if self.timeline:
            self.timeline.begin_step(self.step)

    def backward_over(self) -> None:
        """The last backward pass of the step has ended."""
        if self.timeline:
            self.timeline.backward_over(self.step)

    def submit(self, number: int, send: Callable[[], Waitable]) -> Waitable:
        """Start exchange `number`; returns what to wait for."""
        if self.timeline:
            self.timeline.submit(number)
        work = send()
        self.num_submitted += 1
        if self.timeline:
            self.timeline.started(number)
        return Submitted(self, number, work)


class Submitted:
    """A started exchange whose end is noted."""

    def __init__(self, submissions: Submissions, number: int, work: Waitable):
        self._submissions, self._number, self._work = submissions, number, work

    def wait(self) -> None:
        """Until it is over."""
        noted = self._submissions
        noted.waiting_since = time.monotonic()
        if noted.timeline:
            noted.timeline.waits(self._number)
        self._work.wait()
        noted.waiting_since = None
        noted.num_done += 1
        if noted.timeline:
            noted.timeline.done(self._number)
