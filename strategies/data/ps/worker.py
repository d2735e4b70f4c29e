"""A worker: it computes the gradient of its samples, pushes it, pulls the weights, and joins the barriers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor

from parallelrun.base.context import WorkerContext
from parallelrun.data.order import make_sampler
from parallelrun.distributed import torch_private
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.checkpointing import due
from parallelrun.training.loop.gradients import clip_coefficient
from parallelrun.training.loop.reader import Batch, Reader
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import Evaluation, StepResult, counted_targets
from parallelrun.training.loop.step import count_valid as count_globally
from parallelrun.training.loop.training_loop import check_finite

from .connections import ServerClient
from .plan import ParameterServer
from .protocol import Ask, ServerReply, WorkerRequest


def pause_before_push(settings: ParameterServer, worker: int, clock: int) -> None:
    """Wait as long as `strategy.data.delays` asks of this worker."""
    if seconds := settings.delay(worker):
        time.sleep(seconds)


class Worker:
    """One worker's side of the training. Worker 0, the chief, also evaluates and records."""

    def __init__(self, training: Training, context: WorkerContext):
        self.training, self.context = training, context
        self.client = ServerClient(training.plan, training.data.parameters, training.data.frozen)
        self.index = training.mesh.coordinate.get("dp", 0)
        self.is_chief = self.index == 0
        self.scaler = LossScaler(training.config.precision, scaled=training.plan.precision.scaled)
        self.failed_saves: list[int] = []
        self._settings = ParameterServer.of(training.plan)
        self._pushed_at = time.perf_counter()  # moved forward by pauses
        self._skips = 0

    def begin(self) -> int:
        """Pull the weights; return the last clock that this worker has completed (0 unless the run was resumed)."""
        reply = self.client.read()
        self.client.read_frozen()
        self._pushed_at = time.perf_counter()
        return reply.clock

    def step(self, clock: int, stop: bool) -> tuple[int, ServerReply]:
        """Compute the gradient of this worker's part of global batch `clock`, push it, pull; return the completed clock
        (a late worker skips some) and the first server's reply. Raises NumericsError."""
        batch = self.training.reader.batch(clock)
        loss_sum, num_valid = compute(self.training, batch, self.scaler.scale, self._auxiliary_weight(batch, clock))
        self.client.buffers.pack()
        synchronous, limit = self._settings.synchronous, self.training.config.optimizer.clip
        norm = 0.0 if synchronous else clip(self.client.buffers.pushes, limit)
        pause_before_push(self._settings, self.index, clock)
        now = time.perf_counter()
        request = WorkerRequest(Ask.UPDATE, clock, 0, loss_sum, num_valid, norm, stop, now - self._pushed_at)
        self._pushed_at = now
        reply = self.client.update(request)
        finite = reply.applied > 0 if synchronous else request.finite
        self.training.statistics.finish_step(finite and reply.accepted > 0)
        result = StepResult(reply.loss, reply.norm, finite, reply.stop > 0)
        self._skips = check_finite(self.training, result, self.scaler, clock, self._skips)
        self.scaler.update(finite)
        return max(clock, reply.clock), reply

    def _auxiliary_weight(self, batch: Batch, clock: int) -> float:
        """The weight of this worker's auxiliary losses. Servers weight a push by its targets, of which workers have
        different numbers, but the routing groups of all workers count alike."""
        if not self._settings.counts_targets(self.training.plan):
            return 1.0
        everyone, mine = count_globally(self.training, batch, clock)
        return everyone / (self.training.plan.num_workers * max(mine, 1))

    def step_to_save(self, before: int, clock: int, stopping: bool) -> int | None:
        """Return the step in (before, clock] after which the run saves, if any. A late worker skips clocks."""
        if stopping:
            return clock
        return next((step for step in range(before + 1, clock + 1) if due(self.training.config, step, False)), None)

    def save(self, step: int, final: bool) -> None:
        """Wait at a barrier of all running workers until the servers have begun to save, or, the last time, saved."""
        if self.is_chief:
            self.client.keep_frozen()
        request = WorkerRequest(Ask.SAVE, step, stop=final)
        with self.pause():
            self._note(self.client.wait_at_barrier(request, lambda: self.context.heartbeat(step, "save")))

    def _note(self, failed_step: int) -> None:
        """Record and print that the checkpoint of a step (0: none) could not be written."""
        if not failed_step:
            return
        self.failed_saves.append(failed_step)
        self.context.save_failed(failed_step)
        if self.context.console_owner:
            print(f"warning: the checkpoint of step {failed_step} could not be written; training goes on", flush=True)

    def end(self, clock: int, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until all live workers have finished, then pull the final weights."""

        def wait() -> None:
            self.context.heartbeat(clock, "end")
            waiting()

        self._note(self.client.wait_at_barrier(WorkerRequest(Ask.END, clock), wait))
        self.client.read()

    def evaluate(self) -> Evaluation:
        """Evaluate the weights as last pulled, in this worker alone: the others may be busy or lost."""
        plan, heartbeat = self.training.plan, self.context.heartbeat
        with self.pause():
            return evaluate_locally(self.training, plan.num_workers, lambda number: heartbeat(number, "evaluate"))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of the block out of the next step's."""
        began = time.perf_counter()
        yield
        self._pushed_at += time.perf_counter() - began


def compute(training: Training, batch: Batch, scale: float = 1.0, auxiliary_weight: float = 1.0) -> tuple[float, float]:
    """Compute the gradients of the mean loss over `batch`; return (loss sum, valid targets).

    scale: of the loss in backward only. auxiliary_weight: of the mean of the routing groups' losses.
    """
    training.data.begin_step()
    num_valid = count_valid(training, batch)
    training.routing.begin_step(scale * auxiliary_weight, len(batch))
    loss_sum = training.runner.train(batch, scale / (num_valid or 1.0))
    training.data.finish_gradients()
    if scale != 1.0:
        gradients = [p.tensor.grad for p in training.parameters if p.tensor.grad is not None]
        torch_private.multiply(gradients, 1.0 / scale)
    return float(loss_sum), num_valid


def clip(gradients: list[Tensor], limit: float) -> float:
    """Clip the gradients by their common norm (limit 0: not at all); return the norm before, summed in fp64."""
    norm = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64).square()) for g in gradients) ** 0.5
    coefficient = clip_coefficient(norm, limit) if isfinite(norm) else 1.0
    if coefficient != 1.0:
        torch_private.multiply(gradients, coefficient)
    return float(norm)


@torch.no_grad()
def evaluate_locally(training: Training, num_workers: int, heartbeat: Callable[[int], None]) -> Evaluation:
    """Like `training.loop.step.measure`, but compute all workers' parts of the validation batches in this process."""
    split, config = training.dataset.val, training.config
    size = training.plan.batch.global_batch
    sampler = make_sampler(len(split), size, config.seed, split.shares, shuffle=False)
    totals, num_valid = torch.zeros(2, dtype=torch.float64), 0.0
    for worker in range(num_workers):
        reader = Reader(split, sampler, training.plan, training.mesh, worker)
        for number in range(1, training.eval_batches + 1):
            heartbeat(number)
            batch = reader.batch(number)
            totals += training.runner.evaluate(batch).cpu()
            num_valid += count_valid(training, batch)
    loss_sum, num_right = totals.tolist()
    top1 = num_right / num_valid if training.plan.counts_right_answers else None
    return Evaluation(loss_sum / num_valid if num_valid else float("nan"), top1)


def count_valid(training: Training, batch: Batch) -> float:
    """Return the number of targets >= 0 in `batch`, or the count of the user's own loss over it."""
    if not training.counts_first:
        return len(batch) * training.plan.spec.targets_per_sample
    return float(counted_targets(training, batch))
