"""A timeline (`timeline.json`, for chrome://tracing and Perfetto) of rank 0's reducer, in Horovod's words.

One row per tensor: NEGOTIATE_ALLREDUCE from its gradient being ready until its buffer is sent, ALLREDUCE until the sum
is there. One row per fused buffer: MEMCPY_IN_FUSION_BUFFER (and compression), the backend's all-reduce, and inside it
WAIT_FOR_DATA, while the rank has nothing else to do. Every step is written when its gradients are complete. The array
is never closed, which both viewers read: "JSON Array Format" of the Trace Event Format document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor

from parallelrun.distributed.comm import Waitable
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.contract.plan import Plan

from .plan import Horovod

STEPS_ROW = 0


class WatchedExchange:
    """The exchange of one bucket. It starts and waits like the exchange that it wraps, and notes when.

    names: of the bucket's parameters. moments: of this step, in seconds of `perf_counter`: submitted, started, waited
    for, done.
    """

    def __init__(self, names: tuple[str, ...], num_bytes: int, send: Callable[[], Waitable]):
        self.names, self.num_bytes, self._send = names, num_bytes, send
        self.moments: list[float] = []

    def start(self) -> Waitable:
        self.moments = [perf_counter()]
        self._work = self._send()
        self.moments.append(perf_counter())
        return self

    def wait(self) -> None:
        """Wait until the exchange has ended."""
        self.moments.append(perf_counter())
        self._work.wait()
        self.moments.append(perf_counter())


class Timeline:
    """One file. Rows (`pid`): 0 for steps, then one per buffer, then one per tensor. start: the last step before."""

    def __init__(
        self,
        directory: Path,
        exchanges: Sequence[WatchedExchange],
        parameters: Sequence[LocalParameter],
        plan: Plan,
        start: int,
    ):
        strategy = Horovod.of(plan)
        self._file = (directory / "timeline.json").open("w")
        self._file.write("[\n")
        self._began, self._step = perf_counter(), start
        self._exchanges = exchanges
        names = [name for exchange in exchanges for name in exchange.names]
        self._row_of = {name: 1 + len(exchanges) + number for number, name in enumerate(names)}
        self._ready: dict[str, float] = {}  # when the gradient was, in this step
        native = "NCCL_ALLREDUCE" if plan.device == "cuda" else "GLOO_ALLREDUCE"
        self._operation = native if strategy.algorithm.native else strategy.algorithm.name.upper()
        self._compression = strategy.exchange_form(plan).compression or "none"
        rows = {STEPS_ROW: "steps"} | {1 + n: f"fusion buffer {n}" for n in range(len(exchanges))}
        for row, name in (rows | {row: name for name, row in self._row_of.items()}).items():
            self._write({"name": "process_name", "ph": "M", "pid": row, "args": {"name": name}})
        for step, worker in sorted((batches, worker) for worker, batches in enumerate(strategy.worker_batches)):
            self.mark(f"JOIN: worker {worker} has no batch after step {step}")
        if not plan.pipeline.splits_backward:  # its hooks fire for half of the parameters
            for parameter in parameters:
                self._note_when_ready(parameter.name, parameter.tensor)

    def begin_step(self) -> None:
        self._step += 1
        self.mark(f"STEP {self._step}")

    def backward_is_over(self) -> None:
        self.mark(f"BACKWARD_OVER {self._step}")

    def mark(self, name: str) -> None:
        """Write a mark on the row of steps."""
        self._write({"name": name, "ph": "i", "pid": STEPS_ROW, "tid": 0, "ts": self._micros(perf_counter()), "s": "g"})

    def step_is_summed(self) -> None:
        """Write all exchanges of the step."""
        for number, exchange in enumerate(self._exchanges):
            submitted, started, waits, done = exchange.moments
            details = {"bytes": exchange.num_bytes, "compression": self._compression, "tensors": len(exchange.names)}
            self._span("MEMCPY_IN_FUSION_BUFFER", 1 + number, submitted, started)
            self._span(self._operation, 1 + number, started, done, details)
            self._span("WAIT_FOR_DATA", 1 + number, waits, done)
            for name in exchange.names:
                ready = min(self._ready.get(name, submitted), submitted)
                self._span("NEGOTIATE_ALLREDUCE", self._row_of[name], ready, submitted)
                self._span("ALLREDUCE", self._row_of[name], submitted, done, {"fusion buffer": number})
        self._ready.clear()
        self._file.flush()

    def _note_when_ready(self, name: str, weight: Tensor) -> None:
        weight.register_post_accumulate_grad_hook(lambda _: self._ready.update({name: perf_counter()}))

    def _micros(self, moment: float) -> float:
        return (moment - self._began) * 1e6

    def _span(self, name: str, row: int, start: float, stop: float, details: dict[str, Any] | None = None) -> None:
        times = {"ts": self._micros(start), "dur": (stop - start) * 1e6}
        event = {"name": name, "ph": "X", "pid": row, "tid": 0, **times}
        self._write(event | ({"args": details} if details else {}))

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
