"""The timeline: a Chrome trace (chrome://tracing, Perfetto) of what rank 0's reducer did, in Horovod's words.

One row per tensor: NEGOTIATE_ALLREDUCE from its gradient being ready until its buffer is sent, ALLREDUCE until the sum
is there. One row per fused buffer: MEMCPY_IN_FUSION_BUFFER (what compression does before sending, too), the backend's
all-reduce, and inside it WAIT_FOR_DATA, when nothing else was left to do. Events are written as they happen, so that a
killed run leaves a file that both viewers read; format: "JSON Array Format" of the Trace Event Format document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallelrun.plan.structure import Plan

from .plan import Horovod

STEPS_ROW = 0


class Timeline:
    """One file. Rows (`pid`): 0 for steps, then one per buffer, then one per tensor."""

    def __init__(
        self,
        path: Path,
        buckets: Sequence[tuple[tuple[str, ...], Tensor]],
        strategy: Horovod,
        device: torch.device,
    ):
        self._file = path.open("w")
        self._file.write("[\n")
        self._began = time.perf_counter()
        self._names = [names for names, _ in buckets]
        self._row_of = {name: 1 + len(buckets) + n for n, name in enumerate(n for names, _ in buckets for n in names)}
        self._ready: dict[str, float] = {}
        self._times: dict[int, list[float]] = {}
        self._sizes = [buffer.numel() * buffer.element_size() for _, buffer in buckets]
        backend = "NCCL" if device.type == "cuda" else "GLOO"
        self._operation = f"{backend}_ALLREDUCE" if strategy.algorithm.native else strategy.algorithm.name.upper()
        self._compression = strategy.compression.kind
        rows = {STEPS_ROW: "steps"} | {1 + n: f"fusion buffer {n}" for n in range(len(buckets))}
        for row, name in (rows | {row: name for name, row in self._row_of.items()}).items():
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        for step, worker in sorted((batches, worker) for worker, batches in enumerate(strategy.worker_batches)):
            self._instant(f"JOIN: worker {worker} has no batch after step {step}")

    def watch(self, weights: Mapping[str, nn.Parameter], plan: Plan) -> None:
        """Note when gradients are ready, where the schedule tells."""
        if plan.pipeline.splits_backward:
            return
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(lambda _, name=name: self._ready.update({name: self._now()}))

    def begin_step(self, step: int) -> None:
        """A mark, as Horovod's of a cycle."""
        self._ready.clear()
        self._instant(f"STEP {step}")

    def backward_over(self, step: int) -> None:
        """A mark at the end of the last backward pass."""
        self._instant(f"BACKWARD_OVER {step}")

    def submit(self, number: int) -> None:
        """The buffer is full, and about to be sent."""
        self._times[number] = [self._now()]

    def started(self, number: int) -> None:
        """It is under way."""
        self._times[number].append(self._now())

    def waits(self, number: int) -> None:
        """Nothing is left but to wait for it."""
        self._times[number].append(self._now())

    def done(self, number: int) -> None:
        """Its sum is there: everything about it is written."""
        submitted, started, waits = self._times.pop(number)
        done, row = self._now(), 1 + number
        known = {"bytes": self._sizes[number], "compression": self._compression, "tensors": len(self._names[number])}
        self._span("MEMCPY_IN_FUSION_BUFFER", row, submitted, started)
        self._span(self._operation, row, started, done, known)
        self._span("WAIT_FOR_DATA", row, waits, done)
        for name in self._names[number]:
            ready = min(self._ready.get(name, submitted), submitted)
            self._span("NEGOTIATE_ALLREDUCE", self._row_of[name], ready, submitted)
            self._span("ALLREDUCE", self._row_of[name], submitted, done, {"fusion buffer": number})

    def close(self) -> None:
        """End the array."""
        self._file.write(
            json.dumps({"name": "END", "ph": "i", "pid": STEPS_ROW, "ts": self._now(), "s": "g"}) + "\n]\n"
        )
        self._file.close()

    def _now(self) -> float:
        return (time.perf_counter() - self._began) * 1e6

    def _instant(self, name: str) -> None:
        self._write({"name": name, "ph": "i", "pid": STEPS_ROW, "tid": 0, "ts": self._now(), "s": "g"})
        self._file.flush()

    def _span(self, name: str, row: int, start: float, stop: float, known: dict[str, Any] | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": row, "tid": 0, "ts": start, "dur": stop - start}
        self._write(event | ({"args": known} if known else {}))

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
