"""The training loop of a worker: steps, evaluation, meetings to save and to end, records."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from parallelrun.comm.counter import CommunicationCounter
from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK, EXIT_PREEMPTED
from parallelrun.plan.structure import Collective
from parallelrun.train.build import Training
from parallelrun.train.profiler import StepProfiler
from parallelrun.train.step import Evaluation, measure
from parallelrun.train.timing import StepClock

from .host import collect, publish
from .links import Links
from .scribe import Scribe
from .worker import Worker

COUNTED_STEP = 2  # of this process: the first has set-up traffic


def train(training: Training, context: WorkerContext, step_times: list[float] | None = None) -> int:
    """Train until `config.steps`, or until somebody is asked to stop; the exit code. Raises NumericsError.

    step_times: filled with the seconds of each of this worker's steps (bench).
    """
    config = training.config
    worker = Worker(training, context, Links(training.plan, training.data.parameters, training.data.frozen))
    start = clock = worker.begin()
    scribe = Scribe(training, context, start)
    clocked, profiler = StepClock(training), StepProfiler(training.mesh, config, context.directory)
    counted: list[Collective] | None = None
    failed_saves: list[int] = []
    number, stopped = 0, False
    while clock < config.steps and not stopped:
        number += 1
        context.heartbeat(clock + 1, "step")
        counter = CommunicationCounter(training.mesh) if number == COUNTED_STEP else None
        with counter or nullcontext(), profiler.watch(clock + 1), clocked:
            stride = worker.step(clock + 1, context.stop_requested())
        counted = counter.rows() if counter else counted
        if step_times is not None:
            step_times.append(clocked.seconds)
        before, clock, stopped = clock, stride.clock, stride.reply.stop > 0
        evaluation = _evaluate(worker, scribe, before, clock)
        scribe.step(clock, stride.reply, clocked, evaluation, worker.scaler.scale)
        step = worker.crossed(before, clock, stopped)
        if step is not None and not worker.save(step, stopped or clock >= config.steps):
            failed_saves.append(step)
            _warn(context, step)
    return _end(worker, scribe, counted, clock, stopped, start, failed_saves)


def _evaluate(worker: Worker, scribe: Scribe, before: int, clock: int) -> Evaluation | None:
    """Where it is due: every `eval.every` steps, and after the last, where all have the weights of that step.

    In step, all workers share the work. Otherwise worker 0 does it alone, with the weights it has just pulled, and the
    last one is done when all are through.
    """
    config = worker.training.config
    every = config.eval.every
    due = every > 0 and clock // every > before // every
    if not scribe.by_log:
        if due or clock == config.steps:
            worker.context.heartbeat(clock, "evaluate")
            return worker.paused(lambda: measure(worker.training))
        return None
    if not due or clock >= config.steps or not worker.is_chief:
        return None
    return worker.evaluate()


def _end(
    worker: Worker,
    scribe: Scribe,
    counted: list[Collective] | None,
    clock: int,
    stopped: bool,
    start: int,
    failed_saves: list[int],
) -> int:
    """Meet the others; worker 0 evaluates what has come of it, and writes down what everybody has to tell."""
    training, context = worker.training, worker.context
    code = EXIT_PREEMPTED if stopped else EXIT_OK
    mine = {**scribe.recorder.facts(counted), "torn_reads": worker.links.torn_reads}
    if not worker.is_chief:
        publish(context.rank, mine)
    worker.end(clock, scribe.follow)
    if worker.is_chief:
        if scribe.by_log and not stopped:
            scribe.follow()
            scribe.evaluated(worker.evaluate())
        plan = training.plan
        servers = {rank: collect(rank) for rank in range(plan.num_workers, plan.world)}
        lost = set(servers[plan.num_workers]["lost"])
        others = {rank: collect(rank) for rank in range(1, plan.num_workers) if rank not in lost}
        more: dict[str, Any] = {
            "resumed_step": start or None,
            "failed_saves": len(failed_saves),
            "failed_save_step": failed_saves[-1] if failed_saves else None,
        }
        scribe.finish({0: mine, **others, **servers}, "preempted" if stopped else "done", clock, more)
    worker.links.leave()
    return code


def _warn(context: WorkerContext, step: int) -> None:
    context.save_failed(step)
    if context.console_owner:
        print(f"warning: the checkpoint of step {step} could not be written; training goes on", flush=True)
