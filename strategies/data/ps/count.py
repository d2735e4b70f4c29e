"""What a server sends and receives in a steady step: the second exchange with every worker, as its channel saw it.

The counter of other ranks is a dispatch mode; entered by several threads at once, torch 2.13 crashes now and then where
it looks up how an operation is dispatched (1 of 40 runs). So channels count themselves what they hand to torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from parallelrun.plan.prediction import merge
from parallelrun.plan.structure import Collective

from .protocol import AXIS, CONTROL, NORM_BYTES

COUNTED = 2  # the first has set-up traffic


class StepCounter:
    """Counts on a server. The agreement of servers is part of an update, whichever thread makes it, so it is apart."""

    def __init__(self) -> None:
        self._exchanges: dict[int, int] = {}
        self._rows: list[Collective] = []
        self._agreements = 0

    def exchanged(self, worker: int, rows: Iterable[Collective]) -> None:
        """One push of `worker` has been taken in and answered; `rows` is what that sent and received."""
        self._exchanges[worker] = self._exchanges.get(worker, 0) + 1
        if self._exchanges[worker] == COUNTED:
            self._rows += rows

    def agreed(self) -> None:
        """The servers have agreed on the norm of one update."""
        self._agreements += 1
        if self._agreements == COUNTED:
            self._rows.append(Collective(AXIS, "all_reduce", CONTROL, 1, NORM_BYTES))

    def rows(self) -> list[Collective] | None:
        """One row per axis, operation and purpose; None while some worker's exchange is not counted."""
        return merge(self._rows) if self._exchanges and min(self._exchanges.values()) >= COUNTED else None
