"""A worker of a parameter server: read, compute, push, pull; where the run meets to save, evaluate and end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from parallelrun import torch_private
from parallelrun.context import WorkerContext
from parallelrun.data.order import Sampler
from parallelrun.errors import NumericsError, Problem
from parallelrun.train.batch import Batch
from parallelrun.train.build import Training
from parallelrun.train.checkpointing import due
from parallelrun.train.gradients import EPSILON
from parallelrun.train.loop import MAX_SKIPS
from parallelrun.train.reader import Reader
from parallelrun.train.scaler import LossScaler
from parallelrun.train.step import Evaluation

from .links import Links
from .protocol import END, SAVE, UPDATE, Reply, Request, has_barrier
from .settings import ParameterServerWay

T = TypeVar("T")


@dataclass(frozen=True)
class Stride:
    """One step of one worker: the clock it is at now, and what the first server said of its push."""

    clock: int
    reply: Reply
    finite: bool


def pause_before_push(strategy: ParameterServerWay, worker: int, clock: int) -> None:
    """Be as slow as asked for (`strategy.data.delays`)."""
    if seconds := strategy.delay(worker):
        time.sleep(seconds)


class Worker:
    """One worker's side of the training; `chief` is worker 0, which evaluates and records."""

    def __init__(self, training: Training, context: WorkerContext, links: Links):
        plan = training.plan
        assert isinstance(plan.data, ParameterServerWay)
        self.training, self.context, self.links = training, context, links
        self.strategy, self.barrier = plan.data, has_barrier(plan.data)
        self.index = training.mesh.coordinate.get("dp", 0)
        self.scaler = LossScaler(training.config.precision, scaled=plan.precision.scaled)
        self._paused_s = 0.0
        self._skips = 0

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    def begin(self) -> int:
        """Pull the weights; the last clock that this worker has completed (0 unless the run was resumed)."""
        reply = self.links.read()
        self.links.read_frozen()
        return reply.clock

    def step(self, clock: int, stop: bool) -> Stride:
        """Compute the gradient of this worker's part of the global batch of step `clock`, push it, pull.

        Raises NumericsError where going on makes no sense.
        """
        loss_sum, num_valid = compute(self.training, self.training.reader.batch(clock), self.scaler.scale)
        self.links.buffers.pack()
        finite, norm = isfinite(loss_sum), 0.0
        if not self.barrier:
            norm = clip(self.links.buffers.pushes, self.training.config.optimizer.clip)
            finite = finite and isfinite(norm)
        pause_before_push(self.strategy, self.index, clock)
        request = Request(UPDATE, clock, 0, loss_sum, num_valid, norm, float(finite), float(stop), self._paused_s)
        self._paused_s = 0.0
        reply = self.links.update(request)[0]
        finite = reply.applied > 0 if self.barrier else finite
        self.training.statistics.finish_step(finite and reply.accepted > 0)
        self._check(clock, reply, finite)
        self.scaler.update(finite)
        return Stride(max(clock, reply.clock), reply, finite)

    def crossed(self, before: int, clock: int, stopping: bool) -> int | None:
        """The step after which is to be saved, among those since `before`. A late worker skips steps."""
        config = self.training.config
        if stopping:
            return clock
        return next((step for step in range(before + 1, clock + 1) if due(config, step, False)), None)

    def save(self, step: int, last: bool) -> bool:
        """Meet with all running workers; the servers save. False where that failed and is tried again later."""
        if self.is_chief:
            self.links.keep_frozen()
        request = Request(SAVE, step, stop=float(last))
        return self.paused(lambda: self.links.meet(SAVE, request, lambda: self._beat(step, "save")))

    def end(self, clock: int, waiting=lambda: None) -> None:
        """Wait until all live workers are through, then pull what the last of them have left."""

        def wait() -> None:
            self._beat(clock, "end")
            waiting()

        self.links.meet(END, Request(END, clock), wait)
        self.links.read()

    def evaluate(self) -> Evaluation:
        """The weights as last pulled, by this worker alone: others may be busy, or gone."""
        beat = self.context.heartbeat
        return self.paused(
            lambda: evaluate_alone(self.training, self.training.plan.num_workers, lambda n: beat(n, "evaluate"))
        )

    def paused(self, action: Callable[[], T]) -> T:
        """`action`; what it takes is no part of a step."""
        began = time.perf_counter()
        result = action()
        self._paused_s += time.perf_counter() - began
        return result

    def _beat(self, clock: int, phase: str) -> None:
        self.context.heartbeat(clock, phase)

    def _check(self, clock: int, reply: Reply, finite: bool) -> None:
        """Raises NumericsError where a step was not finite and the next would not be either."""
        if finite:
            self._skips = 0
            return
        self._skips += 1
        overflow_is_expected = self.scaler.scaled and isfinite(reply.loss)
        if overflow_is_expected and self._skips < MAX_SKIPS:
            return
        value, what = (reply.norm, "gradient") if isfinite(reply.loss) else (reply.loss, "loss")
        reason = f"{self._skips} overflowing steps in a row" if overflow_is_expected else f"{what} is {value}"
        raise NumericsError(
            Problem(
                f"step {clock}, worker {self.index}: {reason}; the weights were not changed",
                command="lower optimizer.lr, or precision=fp32",
            )
        )


def compute(training: Training, batch: Batch, scale: float = 1.0) -> tuple[float, int]:
    """Leave the gradient of the mean loss over `batch`'s valid targets in the parameters; (loss sum, valid targets).

    scale: of the loss in backward, taken out of the gradients again.
    """
    num_valid = count_valid(training, batch)
    training.data.begin_step()
    training.routing.begin_step(scale, len(batch))
    loss_sum = training.runner.train(batch, scale / max(num_valid, 1))
    training.data.finish_gradients()
    if scale != 1.0:
        gradients = [parameter.tensor.grad for parameter in training.parameters]
        torch_private.multiply([g for g in gradients if g is not None], 1.0 / scale)
    return float(loss_sum), num_valid


def clip(gradients: list[Tensor], limit: float) -> float:
    """Clip by their common norm (0: not at all); the norm before, summed in fp64."""
    squares = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64).square()) for g in gradients)
    norm = squares**0.5
    coefficient = min(1.0, limit / (norm + EPSILON)) if limit > 0 and isfinite(norm) else 1.0
    if coefficient != 1.0:
        torch_private.multiply(gradients, coefficient)
    return norm


@torch.no_grad()
def evaluate_alone(training: Training, num_workers: int, beat: Callable[[int], None]) -> Evaluation:
    """As `train.step.measure`, of all workers' parts of the validation batches in turn."""
    split, config = training.dataset.val, training.config
    sampler = Sampler(len(split), training.plan.batch.global_batch, config.seed, shuffle=False)
    totals, num_valid = torch.zeros(2, dtype=torch.float64), 0
    for worker in range(num_workers):
        reader = Reader(split, sampler, training.plan, training.mesh, worker)
        for number in range(1, training.eval_batches + 1):
            beat(number)
            batch = reader.batch(number)
            totals += training.runner.evaluate(batch).cpu()
            num_valid += count_valid(training, batch)
    loss_sum, num_right = totals.tolist()
    top1 = num_right / num_valid if training.plan.spec.kind == "images" else None
    return Evaluation(loss_sum / num_valid if num_valid else float("nan"), top1)


def count_valid(training: Training, batch: Batch) -> int:
    """Targets >= 0 in this worker's part."""
    if not training.dataset.has_ignored:
        return len(batch) * training.plan.spec.targets_per_sample
    assert batch.targets is not None, "a worker is one rank: it has the targets"
    return int((batch.targets >= 0).sum())
