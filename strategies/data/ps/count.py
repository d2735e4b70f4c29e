"""What a server sends and receives in a steady step: the second exchange with every worker, each seen in its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from parallelrun.accounting import CommunicationCounter
from parallelrun.plan.account import merge
from parallelrun.plan.structure import Collective

COUNTED = 2  # the first has set-up traffic


@dataclass
class _Outside:
    """What the counter asks of a mesh, of a rank that is in none."""

    rank: int
    axis_of_group: dict[str, str] = field(default_factory=dict)


class StepCounter:
    """Counts on a server. The agreement of servers is part of an update, whichever thread makes it, so it is apart."""

    def __init__(self, rank: int):
        self._outside: Any = _Outside(rank)
        self._exchanges: dict[int, int] = {}
        self._rows: list[Collective] = []
        self._agreements = 0

    @contextmanager
    def exchange(self, worker: int) -> Iterator[dict[str, bool]]:
        """Around one request and its answer; the body sets `is_update` of what it is given."""
        seen = {"is_update": False}
        done = self._exchanges.get(worker, 0)
        if done >= COUNTED:
            yield seen
            return
        with CommunicationCounter(self._outside) as counter:
            yield seen
        if seen["is_update"]:
            self._exchanges[worker] = done + 1
            if done + 1 == COUNTED:
                self._rows += [row for row in counter.rows() if row.operation in ("send", "recv")]

    def agreement(self) -> AbstractContextManager[object]:
        """Around the collective of one update."""
        self._agreements += 1
        return self._agreement() if self._agreements == COUNTED else nullcontext()

    @contextmanager
    def _agreement(self) -> Iterator[None]:
        with CommunicationCounter(self._outside) as counter:
            yield
        self._rows += counter.rows()

    def rows(self) -> list[Collective] | None:
        """One row per axis, operation and purpose; None while some exchange is not counted."""
        return merge(self._rows) if self._exchanges and min(self._exchanges.values()) >= COUNTED else None
