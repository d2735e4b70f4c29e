"""The interface between the launcher and the worker of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ASKED = "asked.json"  # in the directory of a task (launch.task): what its ranks read


@dataclass(frozen=True)
class Pace:
    """How a rank fares: seconds of its last step, of which computing and waiting (for ranks and data), bytes of memory.

    slow: how many times as long as its like it has computed, if it is slow, else 0.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    waiting_s: float = 0.0
    memory_bytes: float = 0.0
    tokens_per_s: float = 0.0
    slow: float = 0.0


@dataclass(frozen=True)
class PendingCollective:
    """An operation that has not ended.

    group: its name, the same on all members; ranks: of the group; number: among the collectives of the group, from 1,
    0 for a message; missing: the ranks that are known not to have come, None if that is not known.
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    number: int
    num_bytes: int
    missing: tuple[int, ...] | None = None

    def absent(self, waits: Mapping[int, PendingCollective], issued: Mapping[int, Mapping[str, int]]) -> list[int]:
        """Return the ranks that have not come. waits: the operation for which each waiting rank waits; issued: the
        number of collectives that each rank has issued, by group."""
        if not self.number:
            return list(self.missing or ())
        return [rank for rank in self.ranks if not self._has_come(rank, waits.get(rank), issued.get(rank, {}))]

    def _has_come(self, rank: int, wait: PendingCollective | None, issued: Mapping[str, int]) -> bool:
        if wait is not None and wait.group == self.group:
            return not wait.number or (wait.number >= self.number and wait.operation == self.operation)
        if self.missing is not None:
            return rank not in self.missing
        return issued.get(self.group, 0) >= self.number


@dataclass(frozen=True)
class WorkerContext:
    """One rank's coordinates in the run, and its connection to the launcher.

    heartbeat(step, phase): report progress. A rank without progress for `config.timeout_s` seconds counts as hanging.
    stop_requested(): whether SIGTERM has arrived; then finish the step, save and return EXIT_PREEMPTED. Ranks may see
    it at different steps, so the training loop must agree on it (sum it over all ranks) before it acts.
    save_failed(step): report in status.json that the checkpoint of that step could not be written, and continue.
    rank_died(rank): report that `rank` has died and the run continues without it. Exactly one other rank calls this.
    report_pace(pace): report how the rank fares, for status.json.
    console_owner: whether this rank writes to the terminal (rank 0 only); other ranks write to their logs.
    prepared: what `prepare` of the worker's module has made before the ranks were forked; None if it was not called.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    directory: Path
    heartbeat: Callable[[int, str], None]
    stop_requested: Callable[[], bool]
    save_failed: Callable[[int], None]
    console_owner: bool
    rank_died: Callable[[int], None] = lambda rank: None
    report_pace: Callable[[Pace], None] = lambda pace: None
    prepared: Any = None
