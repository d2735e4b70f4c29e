"""Writes metrics.jsonl and routing.jsonl while training, and comm, schedule and summary.json at its end, on rank 0."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from parallelrun.base import reserve
from parallelrun.base.context import WorkerContext
from parallelrun.base.records import RowFile, write_json
from parallelrun.distributed.comm import gather_json
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.predict import prediction
from parallelrun.report.progress import ProgressLine
from parallelrun.report.records import attempts
from parallelrun.report.records.routing_log import RoutingLog
from parallelrun.training.loop.build import Training
from parallelrun.training.metrics import summary
from parallelrun.training.metrics.schedule_actions import schedule_document
from parallelrun.training.metrics.step_records import EarlierRows, StepRecord, median_times, timed

STEPS_KEPT = 1000  # of whose times every rank computes its medians


class Recorder:
    """The files and the progress line of one run. Every rank has a recorder; only rank 0's writes.

    rows: the number of rows of metrics.jsonl, if it is not `config.steps`.
    """

    def __init__(self, training: Training, context: WorkerContext, rows: int | None = None):
        self._training = training
        self._directory = context.directory
        self._writes, self._prints = context.rank == 0, context.console_owner
        self._rows_are_steps = rows is None
        self._records: list[StepRecord] = []
        self._recent: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._num_tokens, self._num_tokens_after = 0, 0  # of all steps up to that one
        self._rows = RowFile(context.directory / "metrics.jsonl")
        self._earlier = EarlierRows.of(context.directory) if self._writes else EarlierRows()
        self._routing = RoutingLog(context.directory, training.config.steps)
        self._progress = ProgressLine(rows or training.config.steps, enabled=context.console_owner)

    def step(self, record: StepRecord) -> None:
        """Append the step to metrics.jsonl and routing.jsonl, redraw the progress line. Times are rank 0's."""
        self.remember(record)
        if not self._writes:
            return
        self._records.append(record)
        plan = self._training.plan
        samples = plan.batch.global_batch
        tokens = self._tokens(record.step)
        row: dict[str, Any] = {
            "step": record.step,
            "loss": record.loss,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "samples": record.step * samples,
            "tokens": self._num_tokens,
            "step_time_s": record.step_time_s,
            "time_s": self._earlier.time_s + record.time_s,
            "tokens_per_s": tokens / record.step_time_s,
            **(record.times.fields if record.times else {}),
        }
        if plan.data.independent:
            row["sync"] = plan.data.full_step(record.step) == record.step  # the replicas synchronised at its end
        if not record.applied:
            row["skipped"] = True
        if self._training.plan.precision.scaled:
            row["loss_scale"] = record.loss_scale
        if record.val_loss is not None:
            row["val_loss"] = record.val_loss
        if record.val_top1 is not None:
            row["val_top1"] = record.val_top1
        row.update(self._routing.step(record.step, self._training.routing.described()))
        row.update({f"samples_{label}": count for label, count, _ in self._parts_read(record.step)})
        row.update(record.more)
        self._append(row)
        self._progress.update(row)

    def _tokens(self, step: int) -> int:
        """Add the tokens of a step to `_num_tokens`, which then are those of all steps so far; return them.

        Padding behind packed documents is not counted. Of the steps before a resumed run, documents are counted once.
        """
        training = self._training
        reader, size = training.reader.samples, training.plan.batch.global_batch
        if not reader.split.packs or not self._rows_are_steps:
            tokens = size * training.plan.spec.targets_per_sample
            self._num_tokens = step * tokens
            return tokens
        tokens, first = 0, self._num_tokens_after + 1
        for number in range(first, step + 1):
            indices, _ = reader.sampler.indices(number, 0, size)
            tokens = sum(int(reader.split.document_lengths(index).sum()) for index in indices.tolist())
            self._num_tokens += tokens
        self._num_tokens_after = step
        return tokens

    def _parts_read(self, step: int) -> list[tuple[str, int, float]]:
        """Return label, samples read so far and epochs of every part of a mixture.

        Nothing if workers step on their own: a row is then an update by one of them.
        """
        sampler = self._training.reader.samples.sampler
        shares = self._training.dataset.train.shares if self._rows_are_steps else ()
        return [(share.label, count, count / share.num_samples) for share, count in zip(shares, sampler.counts(step))]

    def undo(self, step: int) -> int:
        """Remove the records of all steps after `step`, which are taken again; return `step`."""
        for records in (self._records, self._recent):
            while records and records[-1].step > step:
                records.pop()
        self._num_tokens = self._num_tokens_after = 0  # counted again from the first step
        if self._writes:
            self._rows.keep(lambda row: row["step"] <= step)
            self._routing.undo(step)
        return step

    def remember(self, record: StepRecord) -> None:
        """Keep the times of a step of this rank for the medians. `step` calls this."""
        if record.times is not None:
            self._recent.append(record)

    def _append(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl. If the disk is full, training continues; print when that begins and ends."""
        waiting = self._rows.num_kept
        self._rows.append(row)
        if self._prints and bool(waiting) != bool(self._rows.num_kept):
            if waiting:
                print(f"step {row['step']}: the disk has room again: {waiting} rows of metrics.jsonl are written")
            else:
                print(
                    f"warning: the disk is full: from step {row['step']} on, rows of metrics.jsonl are kept in memory, "
                    "and written when there is room",
                    flush=True,
                )

    def finish(self, counted: list[Collective] | None, state: str, more: dict[str, Any]) -> None:
        """Gather every rank's traffic (None: no step was counted) and memory; write comm.json and summary.json.

        Collective. more: additional fields of the summary.
        """
        everyone = gather_json(self.facts(counted), self._training.mesh)
        self.write_end(dict(enumerate(everyone)), state, more)

    def facts(self, counted: list[Collective] | None) -> dict[str, Any]:
        """Return this rank's facts for `write_end`, JSON-ready. counted: the traffic of its counted step."""
        coordinate = self._training.mesh.coordinate  # of the ranks of a pp index, one records its actions
        is_first = not any(index for axis, index in coordinate.items() if axis != "pp")
        return {
            "peak_bytes": peak_bytes(self._training.mesh.device),
            "rows": None if counted is None else [asdict(c) for c in counted],
            "times": median_times(timed(self._recent, self._training.config.profile)),
            "actions": self._training.runner.last_actions() if is_first else {},
        }

    def write_end(self, everyone: Mapping[int, dict[str, Any]], state: str, more: Mapping[str, Any]) -> None:
        """Write comm.json and summary.json from the facts of every rank that is alive, by rank."""
        if self._writes:
            counted = {rank: own["rows"] for rank, own in everyone.items()}
            complete = all(rows is not None for rows in counted.values())
            rows = _communication_rows(counted, self._training) if complete else []
            facts = [everyone[rank] for rank in sorted(everyone)]
            actions = [own["actions"] for own in facts if own.get("actions")]  # ascending pp index, as ranks are
            document = self._summary(facts, rows, state)

            def write() -> None:
                self._rows.flush()
                write_json(self._directory / "comm.json", {"schema": 1, "rows": rows})
                if actions:
                    write_json(self._directory / "schedule.json", schedule_document(self._records[-1].step, actions))
                write_json(self._directory / "summary.json", {**document, **more})
                self._routing.flush()

            reserve.insist(self._directory, reserve.RECORDS, write)
        self._progress.close()

    def _summary(self, everyone: list[dict[str, Any]], rows: list[dict[str, Any]], state: str) -> dict[str, Any]:
        """Return the document of summary.json, with the samples that each part of a mixture has given."""
        steps = self._records[-1].step if self._records else self._earlier.last_step
        read = self._parts_read(steps) if steps else []
        mixture = [dict(label=label, samples=count, epochs=epochs) for label, count, epochs in read] or None
        more = {**self._routing.summary(), **attempts.summary(self._directory)}
        document = summary.document(self._training, self._records, self._earlier, everyone, rows, state, more)
        return {**document, "mixture": mixture}


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _communication_rows(measured: Mapping[int, list[dict[str, Any]]], training: Training) -> list[dict[str, Any]]:
    """Return the rows of comm.json: measured and predicted calls and bytes by rank, axis, operation and purpose."""
    plan = training.plan
    rows = []
    for rank, counted in sorted(measured.items()):
        predicted = {row.key: row for row in prediction.collectives(plan, rank)}
        seen = {row.key: row for row in (Collective(**fields) for fields in counted)}
        for key in sorted(predicted.keys() | seen.keys()):
            nothing = Collective(*key, calls=0, payload_bytes=0)
            actual, expected = seen.get(key, nothing), predicted.get(key, nothing)
            rows.append(
                {
                    "rank": rank,
                    "axis": actual.axis,
                    "operation": actual.operation,
                    "purpose": actual.purpose,
                    "calls": actual.calls,
                    "payload_bytes": actual.payload_bytes,
                    "wire_bytes": prediction.wire_bytes(actual, prediction.group_size(plan, actual.axis)),
                    "every": prediction.steps_between(plan, actual.purpose),
                    "predicted_calls": expected.calls,
                    "predicted_payload_bytes": expected.payload_bytes,
                    "predicted_most_bytes": expected.most_bytes,
                }
            )
    return rows
