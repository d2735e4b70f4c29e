"""Records of a run: metrics.jsonl, comm.json, summary.json and servers.json, all written by rank 0.

If the workers are in step, each step of worker 0 is a row of metrics.jsonl. Otherwise each update in the first server's
apply log is a row; the newest row is written with the next one, so that an evaluation can be added to it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from parallelrun.base.context import WorkerContext
from parallelrun.base.records import write_json
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.schedules import learning_rate
from parallelrun.training.loop.step import Evaluation
from parallelrun.training.metrics.recorder import Recorder
from parallelrun.training.metrics.step_records import StepRecord
from parallelrun.training.metrics.timing import StepClock

from .apply_log import AppliedUpdate, ApplyLogReader
from .plan import ParameterServer, sharding, worker_batch
from .protocol import ServerReply

# the fields of `LogStatistics` that summary.json has too
SUMMARY = ("updates", "staleness_mean", "staleness_max", "clock_gap_max", "dropped_gradients")


class MetricsWriter:
    """Writes rank 0's records; on the other ranks it only keeps their step times."""

    def __init__(self, training: Training, context: WorkerContext, start: int):
        plan = training.plan
        self._training, self._context, self._settings = training, context, ParameterServer.of(plan)
        self.by_log = not self._settings.in_step
        num_rows = (training.config.steps - start) * (1 if self._settings.synchronous else plan.num_replicas)
        self.recorder = Recorder(training, context, num_rows if self.by_log else None)
        self._reader = ApplyLogReader(context.directory)
        self._last_record: StepRecord | None = None
        self._samples = start * plan.batch.global_batch
        self._last_s = 0.0
        self._began = time.perf_counter()

    def step(
        self, clock: int, reply: ServerReply, timer: StepClock, evaluation: Evaluation | None, loss_scale: float
    ) -> None:
        """Record this worker's step `clock`."""
        config = self._training.config
        lr, now = learning_rate(config.optimizer, clock, config.steps), time.perf_counter() - self._began
        record = StepRecord(
            clock, reply.loss, reply.norm, lr, reply.applied > 0, timer.seconds, now,
            evaluation.loss if evaluation else None, loss_scale, timer.times, evaluation.top1 if evaluation else None,
        )  # fmt: skip
        if not self.by_log:
            self.recorder.step(record)
            return
        self.recorder.remember(record)
        self.follow_log()
        if evaluation is not None:
            self.add_evaluation(evaluation)

    def follow_log(self) -> None:
        """Record the new updates in the apply log, unless this worker's own steps are the records."""
        if self._context.rank != 0 or not self.by_log:
            return
        for row in self._reader.new_rows():
            if isinstance(row, AppliedUpdate) and row.server == 0:
                self._record_later(self._record(row))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation of the weights after the newest update, as this worker pulled them, to its row."""
        if self._last_record is not None:
            self._last_record = replace(self._last_record, val_loss=evaluation.loss, val_top1=evaluation.top1)

    def finish(self, everyone: dict[int, dict[str, Any]], state: str, clock: int, more: dict[str, Any]) -> None:
        """Write the last row and the files of the end. everyone: the facts of every rank that is not lost."""
        self.follow_log()
        self._record_later(None)
        plan, settings = self._training.plan, self._settings
        first_server = everyone[plan.num_workers]
        statistics = first_server["statistics"]
        facts = {
            "servers": plan.servers,
            "consistency": settings.consistency,
            "staleness_bound": settings.staleness,
            "backup_workers": settings.backup_workers,
            "lost_workers": len(first_server["lost"]) * plan.num_replicas // plan.num_workers,
            "shard_imbalance": sharding(plan).imbalance,
        }
        document = {**statistics, **facts, "blocked_s_of_worker": first_server["blocked_s"]}
        write_json(self._context.directory / "servers.json", document)
        summary = {"steps": clock, **{name: statistics[name] for name in SUMMARY}, **facts, **more}
        self.recorder.write_end(everyone, state, summary)

    def _record(self, row: AppliedUpdate) -> StepRecord:
        """One update as a row: loss and norm are of the worker that pushed, or means over those averaged."""
        plan = self._training.plan
        self._samples += worker_batch(plan) * len(row.pushes)
        seconds = row.step_time_s or row.time_s - self._last_s
        self._last_s = row.time_s
        more: dict[str, Any] = {
            "clock": row.clock,
            "samples": self._samples,
            "tokens": round(self._samples * self._training.tokens_per_sample),
        }
        if self._settings.synchronous:
            more["workers"] = [push.worker for push in row.pushes]
        else:
            more |= {"worker": row.pushes[0].worker, "staleness": row.staleness[0]}
        return StepRecord(
            row.version, row.loss, row.norm, row.lr, row.applied, seconds, row.time_s, None, 1.0, None, None, more
        )

    def _record_later(self, record: StepRecord | None) -> None:
        if self._last_record is not None:
            self.recorder.step(self._last_record)
        self._last_record = record
