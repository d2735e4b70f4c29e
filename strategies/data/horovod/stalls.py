"""The stall warning: who keeps whom waiting, and for which tensors (Horovod's stall inspector)."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from parallelrun import torch_private

from .plan import Horovod
from .submissions import Submissions

if TYPE_CHECKING:
    from parallelrun.plan.structure import Plan

    from ..common.reducer import FlatBucket

MOST_NAMED = 5


@dataclass(frozen=True)
class SubmissionProgress:
    """What one rank says of itself. waits_s: how long it has waited for exchange `num_done`, None when it does not.
    missing: tensors of its next exchange whose gradients are not there yet."""

    step: int
    num_submitted: int
    num_done: int
    waits_s: float | None
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Stall:
    """Ranks that wait, and those for which they do, by the tensors that these have not submitted."""

    step: int
    exchange: int
    waiting: tuple[int, ...]
    missing: tuple[tuple[int, tuple[str, ...]], ...]
    seconds: float

    def text(self) -> str:
        """The warning, in words that users of Horovod know."""
        lines = [
            f"warning: step {self.step}: one or more tensors were submitted to be reduced by a subset of ranks and "
            f"have waited for the rest for {self.seconds:.0f} s (strategy.data.stall_warn_s). Missing ranks:"
        ]
        for rank, names in self.missing:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            lines.append(f"  rank {rank}: {', '.join(names[:MOST_NAMED])}{more}")
        return "\n".join(lines)


def find_stalls(
    groups: Sequence[Sequence[int]],
    said: Mapping[int, SubmissionProgress],
    names: Mapping[int, Sequence[tuple[str, ...]]],
    warn_s: float,
) -> list[Stall]:
    """What is stalled, from what every rank has said last (nothing, if it has not begun). A pure function.

    groups: the ranks that exchange with each other. names: per waiting rank the tensors of each of its exchanges.
    """
    stalls = []
    for group in groups:
        waiting = [r for r in group if r in said and (said[r].waits_s or 0) >= warn_s]
        if not waiting:
            continue
        first = min(waiting, key=lambda r: (said[r].step, said[r].num_done))
        step, exchange = said[first].step, said[first].num_done
        behind = [r for r in group if r not in said or (said[r].step, said[r].num_submitted) <= (step, exchange)]
        behind = [r for r in behind if r not in waiting]
        missing = []
        for rank in behind:
            at_it = rank in said and (said[rank].step, said[rank].num_submitted) == (step, exchange)
            tensors = said[rank].missing if at_it and said[rank].missing else tuple(names[first][exchange])
            missing.append((rank, tensors))
        if missing:
            seconds = max(said[r].waits_s or 0 for r in waiting)
            stalls.append(Stall(step, exchange, tuple(waiting), tuple(missing), seconds))
    return stalls


def watched_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks that wait for each other: those of dp, or of each process set."""
    strategy = Horovod.of(plan)
    everyone = sorted({plan.mesh.group_of(rank, "dp") for rank in range(plan.mesh.num_ranks)})
    sets = strategy.process_sets or (tuple(range(plan.mesh.size("dp"))),)
    return [tuple(ranks[worker] for worker in one) for ranks in everyone for one in sets]


class StallWatch:
    """A thread of every rank: says in the store where its rank is; rank 0's also looks at the others, and warns."""

    def __init__(
        self, submissions: Submissions, buckets: Sequence[FlatBucket], plan: Plan, context: Any, warn_s: float
    ):
        self._submissions, self._buckets = submissions, buckets
        self._rank, self._world, self._warn_s = context.rank, plan.mesh.num_ranks, warn_s
        self._groups = watched_groups(plan)
        self._store = torch_private.default_store()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)
        self._told: dict[tuple[int, int, tuple[int, ...]], float] = {}

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the store goes."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        self._store.set(_key("names", self._rank), json.dumps(self._submissions.names))
        while not self._stopped.wait(min(self._warn_s / 4, 10.0)):
            try:
                self._store.set(_key("progress", self._rank), json.dumps(asdict(self._progress())))
                if self._rank == 0:
                    self._warn()
            except (RuntimeError, ConnectionError):  # the store has gone: the run is ending
                return

    def _progress(self) -> SubmissionProgress:
        noted, since = self._submissions, self._submissions.waiting_since
        number = noted.num_submitted
        missing: tuple[str, ...] = ()
        if number < len(self._buckets):
            slots = zip(noted.names[number], self._buckets[number].slots)
            missing = tuple(name for name, slot in slots if not slot.filled and slot.weight.grad is None)
        waits_s = None if since is None else time.monotonic() - since
        return SubmissionProgress(noted.step, number, noted.num_done, waits_s, missing)

    def _warn(self) -> None:
        said = {
            rank: SubmissionProgress(**fields) for rank, fields in self._read("progress", range(self._world)).items()
        }
        waiting = [rank for rank, progress in said.items() if (progress.waits_s or 0) >= self._warn_s]
        if not waiting:
            return
        for stall in find_stalls(self._groups, said, self._read("names", waiting), self._warn_s):
            key, now = (stall.step, stall.exchange, stall.waiting), time.monotonic()
            if now - self._told.get(key, -self._warn_s) >= self._warn_s:
                self._told = {key: now}
                print(stall.text(), file=sys.stderr, flush=True)

    def _read(self, what: str, ranks: Sequence[int]) -> dict[int, Any]:
        found = [rank for rank in ranks if self._store.check([_key(what, rank)])]
        return {rank: json.loads(self._store.get(_key(what, rank))) for rank in found}


def _key(what: str, rank: int) -> str:
    return f"horovod/{what}/{rank}"
