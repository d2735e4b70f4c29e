"""One rank of a worker: with the other ranks it computes the gradient of the worker's samples; it pushes its part of
it, pulls the weights, and joins the barriers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite, sqrt

import torch
from torch import Tensor

from parallelrun.base.context import WorkerContext
from parallelrun.data.order import make_sampler
from parallelrun.distributed import comm, torch_private
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.checkpointing import due
from parallelrun.training.loop.gradients import clip_coefficient
from parallelrun.training.loop.reader import Batch, Reader
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import Evaluation, StepResult, evaluate
from parallelrun.training.loop.step import count_valid as count_globally
from parallelrun.training.loop.training_loop import check_finite

from .client import ServerClient
from .plan import ParameterServer, counting_axis, worker_batch
from .protocol import CONTROL, Ask, ServerReply, WorkerRequest


def pause_before_push(settings: ParameterServer, worker: int, clock: int) -> None:
    """Wait as long as `strategy.data.delays` asks of this worker."""
    if seconds := settings.delay(worker):
        time.sleep(seconds)


class Worker:
    """One rank's side of the training. The ranks of worker 0, the chief, also evaluate, and rank 0 records."""

    def __init__(self, training: Training, context: WorkerContext):
        self.training, self.context = training, context
        self.client = ServerClient(training)
        self.index = training.mesh.coordinate.get(training.plan.worker_axis, 0)
        self.is_chief = self.index == 0
        self.scaler = LossScaler(training.config.precision, scaled=training.plan.precision.scaled)
        self.failed_saves: list[int] = []
        self._settings = ParameterServer.of(training.plan)
        self._pushed_at = time.perf_counter()  # moved forward by pauses
        self._skips = 0

    def begin(self) -> int:
        """Pull the weights; return the last clock that this worker has completed (0 unless the run was resumed)."""
        reply = self.client.read()
        if self.training.config.resume:
            self.client.read_frozen()
        self._pushed_at = time.perf_counter()
        return reply.clock

    def step(self, clock: int, stop: bool) -> tuple[int, ServerReply]:
        """Compute the gradient of this worker's part of global batch `clock`, push it, pull; return the completed clock
        (a late worker skips some) and the first server's reply. Raises NumericsError."""
        training = self.training
        loss_sum, num_valid = compute(training, training.reader.batch(clock), self.scaler.scale)
        if self._settings.in_step:
            training.routing.launch()
        self.client.buffers.pack()
        norm = 0.0 if self._settings.synchronous else clip(self.client.buffers.pushes, training)
        pause_before_push(self._settings, self.index, clock)
        now = time.perf_counter()
        request = WorkerRequest(Ask.UPDATE, clock, 0, loss_sum, num_valid, norm, stop, now - self._pushed_at)
        self._pushed_at = now
        reply = self.client.update(request)
        finite = reply.applied > 0
        training.statistics.finish_step(finite and reply.accepted > 0)
        training.routing.finish_step(finite)
        result = StepResult(reply.loss, reply.norm, finite, reply.stop > 0)
        self._skips = check_finite(training, result, self.scaler, clock, self._skips)
        self.scaler.update(finite)
        return max(clock, reply.clock), reply

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
        with self.pause():
            return evaluate_locally(self.training, lambda number: self.context.heartbeat(number, "evaluate"))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of the block out of the next step's."""
        began = time.perf_counter()
        yield
        self._pushed_at += time.perf_counter() - began


def compute(training: Training, batch: Batch, scale: float = 1.0) -> tuple[float, float]:
    """Compute the worker's gradients of the mean loss over its samples; return this rank's (loss sum, valid targets),
    which no other rank counts.

    scale: of the loss in backward only.
    """
    training.data.begin_step()
    divisor, num_valid = count_valid(training, batch)
    training.routing.begin_step(scale, worker_batch(training.plan))
    loss_sum = training.runner.train(batch, scale / divisor)
    training.data.finish_gradients()
    training.gradients.finalise()
    if scale != 1.0:
        gradients = [p.tensor.grad for p in training.parameters if p.tensor.grad is not None]
        torch_private.multiply(gradients, 1.0 / scale)
    return float(loss_sum) if training.counts_loss else 0.0, num_valid if training.counts_targets else 0.0


def clip(pushes: list[Tensor], training: Training) -> float:
    """Clip a worker's gradient by its norm (limit 0: not at all); return the norm before, summed in fp64.

    pushes: this rank's part of it. The ranks of a worker push each element once.
    """
    limit = training.config.optimizer.clip
    squares = torch.zeros(1, dtype=torch.float64)
    for gradient in pushes:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    comm.all_reduce(squares, training.mesh.group(training.plan.worker_ranks), CONTROL)
    norm = sqrt(squares.item())
    coefficient = clip_coefficient(norm, limit) if isfinite(norm) else 1.0
    if coefficient != 1.0:
        torch_private.multiply(pushes, coefficient)
    return norm


def evaluate_locally(training: Training, heartbeat: Callable[[int], None]) -> Evaluation:
    """Like `training.loop.step.measure`, but compute all replicas' parts of the validation batches in this worker."""
    split, config, plan = training.dataset.val, training.config, training.plan
    size = plan.batch.global_batch
    sampler = make_sampler(len(split), size, config.seed, split.shares, shuffle=False)
    of_worker = plan.mesh.size("dp") // plan.num_replicas  # the replicas that its ranks compute at the same time
    first, num_replicas = training.mesh.coordinate.get("dp", 0) % of_worker, size // plan.batch.replica_batch

    def batches() -> Iterator[Batch]:
        for replica in range(first, num_replicas, of_worker):
            reader = Reader(split, sampler, plan, training.mesh, replica)
            for number in range(1, training.eval_batches + 1):
                heartbeat(number)
                yield reader.batch(number)

    return evaluate(training, batches(), count_valid, plan.worker_ranks)


def count_valid(training: Training, batch: Batch) -> tuple[float, float]:
    """Return (the number of targets by which a worker divides its loss, this rank's valid targets).

    The first is of its own samples, or, if all workers take every step together, the mean over workers.
    """
    plan = training.plan
    if plan.data.in_step or not training.counts_first:
        everyone, mine = count_globally(training, batch)
        return everyone / plan.num_replicas, mine
    return count_globally(training, batch, axis=counting_axis(plan))
