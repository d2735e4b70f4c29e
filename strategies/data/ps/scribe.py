"""What worker 0 writes: metrics.jsonl, comm.json, summary.json and servers.json.

Where all workers take every step together its own steps are the rows. Otherwise an applied update is a row, told by
the first server's apply log; the newest is held back until the next one comes, so that an evaluation can go into it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from parallelrun.context import WorkerContext
from parallelrun.records import write_json
from parallelrun.train import schedule
from parallelrun.train.build import Training
from parallelrun.train.recorder import Recorder, StepRecord
from parallelrun.train.step import Evaluation
from parallelrun.train.timing import StepClock

from .figures import Figures
from .log import Applied, LogReader
from .protocol import Reply, has_barrier
from .settings import ParameterServerWay
from .shards import imbalance, server_bytes

NAME = "servers.json"


class Scribe:
    """Worker 0's; the other workers' keeps only their times."""

    def __init__(self, training: Training, context: WorkerContext, start: int):
        plan = training.plan
        assert isinstance(plan.data, ParameterServerWay)
        self._training, self._context, self._way = training, context, plan.data
        self.by_log = not has_barrier(plan.data) or plan.data.backup_workers > 0
        num_rows = (training.config.steps - start) * (1 if has_barrier(plan.data) else plan.num_workers)
        self.recorder = Recorder(training, context, num_rows if self.by_log else None)
        self._reader, self._figures = LogReader(context.directory), Figures()
        self._held: StepRecord | None = None
        self._own: list[StepRecord] = []
        self._samples = start * plan.batch.global_batch
        self._last_s = 0.0
        self._began = time.perf_counter()

    def step(self, clock: int, reply: Reply, clocked: StepClock, evaluation: Evaluation | None, scale: float) -> None:
        """Record a step of this worker: `clock`, that it has completed."""
        lr = schedule.learning_rate(self._training.config.optimizer, clock, self._training.config.steps)
        record = StepRecord(
            clock, reply.loss, reply.norm, lr, reply.applied > 0, clocked.seconds, time.perf_counter() - self._began,
            evaluation.loss if evaluation else None, scale, clocked.times, evaluation.top1 if evaluation else None,
        )  # fmt: skip
        if not self.by_log:
            self.recorder.step(record)
            self.follow()
            return
        self.recorder.remember(record)
        self.follow()
        if evaluation is not None:
            self.evaluated(evaluation)

    def follow(self) -> None:
        """Read on in the apply log."""
        if self._context.rank != 0:
            return
        for row in self._reader.new():
            self._figures.add(row)
            if self.by_log and isinstance(row, Applied) and row.server == 0:
                self._hold(self._record(row))

    def evaluated(self, evaluation: Evaluation) -> None:
        """The weights after the newest update, as this worker pulled them, have been evaluated."""
        if self._held is not None:
            self._held = replace(self._held, val_loss=evaluation.loss, val_top1=evaluation.top1)

    def finish(self, everyone: dict[int, dict[str, Any]], state: str, clock: int, more: dict[str, Any]) -> None:
        """Write the last row and the files of the end. everyone: the facts of every rank that is left."""
        self.follow()
        self._hold(None)
        plan = self._training.plan
        servers = [everyone[plan.num_workers + index] for index in range(plan.servers)]
        blocked = {int(w): seconds for w, seconds in servers[0]["blocked_s"].items()}
        facts = {
            **self._figures.summary(),
            "servers": plan.servers,
            "consistency": self._way.consistency,
            "staleness_bound": self._way.staleness,
            "backup_workers": self._way.backup_workers,
            "torn_reads": sum(one.get("torn_reads", 0) for one in everyone.values()),
            "blocked_s": max(blocked.values(), default=0.0),
            "lost_workers": len(servers[0]["lost"]),
            "shard_imbalance": imbalance(plan),
        }
        document = {
            **self._figures.document(),
            **facts,
            "blocked_s_of_worker": blocked,
            "lost_worker_numbers": servers[0]["lost"],
            "shard_bytes": server_bytes(plan),
            "pushed_bytes": [one["pushed_bytes"] for one in servers],
            "pulled_bytes": [one["pulled_bytes"] for one in servers],
        }
        if self._context.rank == 0:
            write_json(self._context.directory / NAME, document)
        self.recorder.write_end(everyone, state, {"steps": clock, **facts, **more})

    def _record(self, row: Applied) -> StepRecord:
        """One update as a row. Its loss and norm are those of the worker that pushed, or the mean of those averaged."""
        plan = self._training.plan
        self._samples += plan.batch.replica_batch * len(row.pushes)
        seconds = row.step_time_s or row.time_s - self._last_s
        self._last_s = row.time_s
        more: dict[str, Any] = {
            "clock": row.clock,
            "samples": self._samples,
            "tokens": self._samples * plan.spec.targets_per_sample,
        }
        if has_barrier(self._way):
            more["workers"] = [push.worker for push in row.pushes]
        else:
            more |= {"worker": row.pushes[0].worker, "staleness": row.staleness[0]}
        return StepRecord(
            row.version, row.loss, row.norm, row.lr, row.applied, seconds, row.time_s, None, 1.0, None, None, more
        )

    def _hold(self, record: StepRecord | None) -> None:
        if self._held is not None:
            self.recorder.step(self._held)
        self._held = record
