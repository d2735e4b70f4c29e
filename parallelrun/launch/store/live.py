"""Progress reports of ranks under another launcher: each rank writes a small file, and rank 0 gathers them.

Our own launcher reads its ranks' memory instead.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_json
from parallelrun.launch.host.directory import STATUS_EVERY_S, Status
from parallelrun.launch.store.rendezvous import Member

_RANKS_AT_ONCE = 32  # that write in STATUS_EVERY_S, so that many ranks do not keep a shared disk busy

Rows = Callable[[], list[dict[str, Any]]]


def path_of(directory: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return directory / "logs" / f"live_rank_{rank}.json"


def period_s(world: int) -> float:
    """Return how often each of `world` ranks writes its file."""
    return STATUS_EVERY_S * max(1.0, world / _RANKS_AT_ONCE)


@dataclass
class LiveFile:
    """The file of one rank other than 0. Its methods are those of `Status` that a watchdog calls."""

    directory: Path
    rank: int
    world: int
    next_update: float = 0.0

    def update(self, step: int, failed_save_step: int, ranks: Rows) -> None:
        """Write this rank's row, if it is time."""
        if time.monotonic() >= self.next_update:
            self.next_update = time.monotonic() + period_s(self.world)
            with contextlib.suppress(OSError):  # a full disk must not end a run because of this
                write_json(path_of(self.directory, self.rank), ranks()[0])

    def remove(self) -> None:
        """Delete the file: the rank has ended."""
        with contextlib.suppress(OSError):
            path_of(self.directory, self.rank).unlink()


@dataclass
class GatheredStatus(Status):
    """The status that rank 0 writes, with a row for every rank: its own, and what the others have written last."""

    members: Sequence[Member] = ()
    _last: dict[int, tuple[str, float]] = field(default_factory=dict)  # text by rank, and when it came

    def begin(self) -> None:
        """Record who the ranks are, before they report: the guard of the status looks whether they live."""
        self.running(ranks=[self._row(member) for member in self.members])

    def update(self, step: int, failed_save_step: int, ranks: Rows = list) -> None:
        """See `Status.update`. ranks: returns the row of rank 0."""
        super().update(step, failed_save_step, lambda: [*ranks(), *map(self._row, self.members[1:])])

    def _row(self, member: Member) -> dict[str, Any]:
        """Return what a rank has written last; a row that says that it was not seen, if it has written nothing."""
        now = time.monotonic()
        try:
            text = path_of(self.directory, member.rank).read_text()
            row: dict[str, Any] = json.loads(text)
        except (OSError, ValueError):
            return {"rank": member.rank, "pid": member.pid, "host": member.host, "seen": False}
        before, since = self._last.get(member.rank, ("", now))
        if text != before:
            self._last[member.rank], since = (text, now), now
        return {**row, "silent_s": round(float(row["silent_s"]) + now - since, 3)}

    def remove(self) -> None:
        """Delete the files that other ranks have left."""
        for member in self.members[1:]:
            LiveFile(self.directory, member.rank, len(self.members)).remove()
