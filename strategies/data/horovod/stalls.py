"""The stall warning: which ranks keep others waiting, and for which tensors (Horovod's stall inspector)."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from parallelrun.base.context import PendingCollective
from parallelrun.distributed import torch_private

from .exchanges import WatchedExchange
from .plan import Horovod

if TYPE_CHECKING:
    from parallelrun.base.context import WorkerContext
    from parallelrun.planner.contract.plan import Plan

    from ..common.reducer import FlatBucket

MOST_NAMED = 5
_KEY = "horovod/progress/{rank}"
_GROUP = "gradients"


@dataclass(frozen=True)
class SubmissionProgress:
    """The last report of one rank. num_submitted: exchanges since the start of the run; num_done: of this step;
    waits_s: how long it has waited for exchange `num_done`; None if it does not wait.

    tensors: of the exchange for which it waits, or else those of its next exchange whose gradients are not computed.
    """

    step: int
    num_submitted: int
    num_done: int
    waits_s: float | None
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Stall:
    """Ranks that wait, and the ranks for which they wait with the tensors that these have not submitted."""

    step: int
    exchange: int
    waiting: tuple[int, ...]
    missing: tuple[tuple[int, tuple[str, ...]], ...]
    seconds: float

    def text(self) -> str:
        """Return the warning, in words that users of Horovod know."""
        lines = [
            f"warning: step {self.step}: one or more tensors were submitted to be reduced by a subset of ranks and "
            f"have waited for the rest for {self.seconds:.0f} s (strategy.data.stall_warn_s). Missing ranks:"
        ]
        for rank, names in self.missing:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            lines.append(f"  rank {rank}: {', '.join(names[:MOST_NAMED])}{more}")
        return "\n".join(lines)


def find_stalls(
    groups: Sequence[Sequence[int]], reports: Mapping[int, SubmissionProgress], warn_s: float
) -> list[Stall]:
    """Return the stalls of at least `warn_s` seconds. A pure function.

    groups: the ranks that exchange with each other. reports: the last one of each rank that has begun.
    """
    stalls = []
    for group in groups:
        waiting = {r: reports[r] for r in group if r in reports and (reports[r].waits_s or 0) >= warn_s}
        if not waiting:
            continue
        first = min(waiting.values(), key=lambda report: (report.step, report.num_done))
        # An exchange that a rank has submitted may still need it: shared memory sums in the ranks' own threads. So they
        # wait for the last exchange.
        last = max(report.num_submitted for report in waiting.values())
        pending = PendingCollective(_GROUP, tuple(group), "all_reduce", last, 0)
        issued = {rank: {_GROUP: report.num_submitted} for rank, report in reports.items()}
        missing = []
        for rank in pending.absent(dict.fromkeys(waiting, pending), issued):
            report = reports.get(rank)
            named = report.tensors if report and report.step == first.step else ()
            missing.append((rank, named or first.tensors))
        if missing:
            seconds = max(report.waits_s or 0 for report in waiting.values())
            stalls.append(Stall(first.step, first.num_done, tuple(waiting), tuple(missing), seconds))
    return stalls


class StallWatch:
    """A thread of every rank that reports its progress through the store; rank 0's also reads all reports and warns.

    exchanges, buckets: of this rank, in the same order.
    """

    def __init__(
        self, exchanges: Sequence[WatchedExchange], buckets: Sequence[FlatBucket], plan: Plan, context: WorkerContext
    ):
        strategy = Horovod.of(plan)
        self._exchanges, self._buckets = exchanges, buckets
        self._rank, self._world, self._warn_s = context.rank, plan.mesh.num_ranks, strategy.stall_warn_s
        self._groups = strategy.rank_groups(plan)
        self._store = torch_private.default_store()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)
        self._warned: dict[tuple[int, int, tuple[int, ...]], float] = {}  # when, by stall
        self.step = 0
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the store ends."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopped.wait(min(self._warn_s / 4, 10.0)):
            try:
                self._store.set(_KEY.format(rank=self._rank), json.dumps(asdict(self._progress())))
                if self._rank == 0:
                    self._warn()
            except (RuntimeError, ConnectionError):  # the store has ended, and so does the run
                return

    def _progress(self) -> SubmissionProgress:
        submitted = sum(exchange.is_submitted for exchange in self._exchanges)
        done = sum(exchange.is_done for exchange in self._exchanges)
        waits = [(exchange.waits_s, exchange.names) for exchange in self._exchanges]
        waits_s, tensors = next((wait for wait in waits if wait[0] is not None), (None, ()))
        if waits_s is None and submitted < len(self._buckets):
            slots = zip(self._exchanges[submitted].names, self._buckets[submitted].slots)
            tensors = tuple(name for name, slot in slots if not slot.filled and slot.weight.grad is None)
        before = (self.step - 1) * len(self._exchanges)
        return SubmissionProgress(self.step, before + submitted, done, waits_s, tensors)

    def _warn(self) -> None:
        keys = {rank: _KEY.format(rank=rank) for rank in range(self._world)}
        reported = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        reports = {rank: SubmissionProgress(**fields) for rank, fields in reported.items()}
        for stall in find_stalls(self._groups, reports, self._warn_s):
            key, now = (stall.step, stall.exchange, stall.waiting), time.monotonic()
            if now - self._warned.get(key, -self._warn_s) >= self._warn_s:
                self._warned = {key: now}
                print(stall.text(), file=sys.stderr, flush=True)
