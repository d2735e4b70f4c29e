"""Meetings of workers at a server: all that must be there come, something is done once, all go on. No threads here."""

from __future__ import annotations

from collections.abc import Set


class Meeting:
    """One kind of meeting, held again and again. A worker comes, asks until it has been held, and goes.

    last: one of those who have come says that it will not come again.
    """

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._answers: dict[int, int] = {}  # of a meeting that has been held, not fetched yet
        self.last = False

    def come(self, worker: int, last: bool) -> None:
        """`worker` is here, or asks again."""
        if worker not in self._answers:
            self._present.add(worker)
            self.last = self.last or last

    def complete(self, expected: Set[int]) -> bool:
        """Has everybody come? Not when nobody is expected."""
        return bool(self._present) and self._present >= expected

    def hold(self, succeeded: bool) -> None:
        """It has taken place."""
        self._answers |= dict.fromkeys(self._present, 1 if succeeded else -1)
        self._present.clear()
        self.last = False

    def is_waiting(self, worker: int) -> bool:
        """Has `worker` come, and has it not been held since?"""
        return worker in self._present

    def answer(self, worker: int) -> int:
        """1 held, -1 held and failed, 0 not yet. What was held is answered once."""
        return self._answers.pop(worker, 0)
