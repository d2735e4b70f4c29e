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
    """The last report of one rank. num_submitted: exchanges since the start of the run; waits_s: how long it has waited
    for an exchange; 0 if it does not wait.

    tensors: of the exchange for which it waits, or else those of its next exchange whose gradients are not computed.
    """

    step: int
    num_submitted: int
    waits_s: float
    tensors: tuple[str, ...]


def stall_warning(group: Sequence[int], reports: Mapping[int, SubmissionProgress], warn_s: float) -> str:
    """Return the warning, in words that users of Horovod know, if a rank of `group` has waited for at least `warn_s`
    for others, else an empty text. reports: the last one of each rank that has begun."""
    waiting = {rank: reports[rank] for rank in group if rank in reports and reports[rank].waits_s >= warn_s}
    if not waiting:
        return ""
    longest = max(waiting.values(), key=lambda report: report.waits_s)
    # An exchange that a rank has submitted may still need it: shared memory sums in the ranks' own threads. So the
    # ranks wait for the last exchange that one of them has submitted.
    last = max(report.num_submitted for report in waiting.values())
    pending = PendingCollective(_GROUP, tuple(group), "all_reduce", last, 0)
    issued = {rank: {_GROUP: report.num_submitted} for rank, report in reports.items()}
    missing = pending.absent(dict.fromkeys(waiting, pending), issued)
    if not missing:
        return ""
    lines = [
        f"warning: step {longest.step}: one or more tensors were submitted to be reduced by a subset of ranks and "
        f"have waited for the rest for {longest.waits_s:.0f} s (strategy.data.stall_warn_s). Missing ranks:"
    ]
    for rank in missing:
        report = reports.get(rank, longest)
        names = (report.tensors if report.step == longest.step else ()) or longest.tensors
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        lines.append(f"  rank {rank}: {', '.join(names[:MOST_NAMED])}{more}")
    return "\n".join(lines)


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
        self._next_warning = 0.0  # a stall is reported again every `stall_warn_s`
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
        num_submitted = sum(exchange.is_submitted for exchange in self._exchanges)
        waits = [(exchange.waits_s, exchange.names) for exchange in self._exchanges]
        waits_s, tensors = next((wait for wait in waits if wait[0]), (0.0, ()))
        if not waits_s and num_submitted < len(self._buckets):
            slots = zip(self._exchanges[num_submitted].names, self._buckets[num_submitted].slots)
            tensors = tuple(name for name, slot in slots if not slot.filled and slot.weight.grad is None)
        return SubmissionProgress(self.step, (self.step - 1) * len(self._exchanges) + num_submitted, waits_s, tensors)

    def _warn(self) -> None:
        if time.monotonic() < self._next_warning:
            return
        keys = {rank: _KEY.format(rank=rank) for rank in range(self._world)}
        reported = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        reports = {rank: SubmissionProgress(**fields) for rank, fields in reported.items()}
        for warning in filter(None, (stall_warning(group, reports, self._warn_s) for group in self._groups)):
            self._next_warning = time.monotonic() + self._warn_s
            print(warning, file=sys.stderr, flush=True)
