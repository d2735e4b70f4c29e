"""Why ranks on several hosts failed, as their launcher sees it: how each ended, what it wrote, which host is gone.

The clocks of hosts differ, so the first is the one that the launcher heard of first. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from parallelrun.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_RANK_DIED, Problem
from parallelrun.launch import failure
from parallelrun.launch.failure import Failure
from parallelrun.run_records.read import METRICS
from parallelrun.run_records.rows import last_row


@dataclass(frozen=True)
class Exit:
    """How a rank ended that nobody has ended. status: its exit code, or minus the number of a signal; memory: its host
    had too little. host: its name in -H; time_ns: when the launcher heard of it."""

    rank: int
    status: int
    memory: bool = False
    host: str = ""
    time_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class LostHost:
    """A host to which the connection was lost. ranks: as a text; why: we have ended it."""

    name: str
    first_rank: int
    ranks: str
    why: str = ""
    time_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def what(self) -> str:
        return f"the connection to host {self.name} ({self.ranks}) was lost" + (f": {self.why}" if self.why else "")

    @property
    def failure(self) -> Failure:
        """The failure of the host's first rank; the message is about the host."""
        problems = (Problem(self.what),)
        return Failure(self.first_rank, self.what, EXIT_RANK_DIED, self.time_ns, problems=problems, host=self.name)


def cause(directory: Path, exits: Sequence[Exit], lost: Sequence[LostHost]) -> Failure | None:
    """Return the root cause; None if nothing has failed."""
    found = [_of_exit(directory, one) for one in exits if one.status not in (EXIT_OK, EXIT_PREEMPTED)]
    found += [one.failure for one in lost]
    return failure.explained(failure.root_cause(found), directory) if found else None


def _of_exit(directory: Path, one: Exit) -> Failure:
    written = failure.read(directory, one.rank) if one.status >= 0 else None
    if written is not None:
        return replace(written, time_ns=one.time_ns, host=one.host)
    row = last_row(directory / METRICS)
    died = failure.of_exit(one.rank, one.status, one.time_ns, one.memory)
    return replace(died, step=int(row.get("step", 0)), host=one.host)
