"""The entry of a parameter server: what a worker and a server do for each verb, and the workers' training loop."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_OK, EXIT_PREEMPTED
from parallelrun.config.schema.run_schema import Config
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.report.records import attempts
from parallelrun.report.runs import final_panel as report
from parallelrun.training.loop import bench
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.saves import SaveTimes
from parallelrun.training.loop.step import Evaluation, measure
from parallelrun.training.metrics.profiler import StepProfiler
from parallelrun.training.metrics.recorder import peak_bytes
from parallelrun.training.metrics.timing import StepClock

from ..common.worker_runtime import WorkerRuntime
from . import reference
from .connections import collect_facts, publish_facts
from .metrics import MetricsWriter
from .protocol import COUNTED
from .server import Server
from .worker import Worker


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run `config.verb` as this rank, worker or server; return the exit code. `launch/ranks/worker.py` calls it."""
    if config.verb == "verify":
        config, plan = reference.checked(config, plan)
    if config.verb == "bench":
        steps = config.bench.warmup + config.bench.steps
        config = replace(config, steps=steps, eval=replace(config.eval, every=0))
    if plan.role(context.rank) == "server":
        server = Server(config, plan, context)
        server.serve()
        return EXIT_PREEMPTED if server.stopped else EXIT_OK
    if config.verb == "verify":
        return reference.verify(config, plan, context)
    training = build(config, plan, context.device)
    if config.verb != "bench":
        code = _train(training, context)
        if context.console_owner:
            report.show(context.directory)
        return code
    step_times: list[float] = []  # worker 0's: workers that are not in step have a pace of their own
    code = _train(training, context, step_times)
    if context.rank == 0:
        bench.write(step_times[config.bench.warmup :], peak_bytes(context.device), training, context)
    return code


def _train(training: Training, context: WorkerContext, step_times: list[float] | None = None) -> int:
    """Train until `config.steps` or a stop request; return the exit code. Raises NumericsError.

    step_times: filled with the seconds of each of this worker's steps (bench).
    """
    config, worker = training.config, Worker(training, context)
    start = clock = worker.begin()
    if context.rank == 0:
        attempts.first_step_begins(context.directory)
    writer = MetricsWriter(training, context, start)
    timer, profiler = StepClock(training), StepProfiler(training.mesh, config, context.directory)
    counted: list[Collective] | None = None
    number, stopped = 0, False
    while clock < config.steps and not stopped:
        number, before = number + 1, clock
        context.heartbeat(clock + 1, "step")
        counter = CommunicationCounter(training.mesh) if number == COUNTED else None
        with counter or nullcontext(), profiler.watch(clock + 1), timer:
            clock, reply = worker.step(clock + 1, context.stop_requested())
        counted = counter.rows() if counter else counted
        if step_times is not None:
            step_times.append(timer.seconds)
        stopped = reply.stop > 0
        writer.step(clock, reply, timer, _evaluate(worker, writer, before, clock), worker.scaler.scale)
        to_save = worker.step_to_save(before, clock, stopped)
        if to_save is not None:
            worker.save(to_save, stopped or clock >= config.steps)
    _end(worker, writer, counted, start, clock, stopped)
    worker.client.leave()
    return EXIT_PREEMPTED if stopped else EXIT_OK


def _evaluate(worker: Worker, writer: MetricsWriter, before: int, clock: int) -> Evaluation | None:
    """Evaluate if it is due: every `eval.every` steps, and after the last.

    Workers in step share the work. Otherwise worker 0 evaluates the weights that it has just pulled, and the final
    evaluation waits until all workers have finished (`_end`).
    """
    config = worker.training.config
    due = config.eval.every > 0 and clock // config.eval.every > before // config.eval.every
    if writer.by_log:
        return worker.evaluate() if due and clock < config.steps and worker.is_chief else None
    if not due and clock != config.steps:
        return None
    worker.context.heartbeat(clock, "evaluate")
    with worker.pause():
        return measure(worker.training)


def _end(
    worker: Worker, writer: MetricsWriter, counted: list[Collective] | None, start: int, clock: int, stopped: bool
) -> None:
    """Wait for the other workers; worker 0 evaluates the final weights, and rank 0 writes the facts of all ranks."""
    plan, context = worker.training.plan, worker.context
    own_facts = writer.recorder.facts(counted)
    if context.rank:
        publish_facts(context.rank, own_facts)
    worker.end(clock, writer.follow_log)
    if worker.is_chief and writer.by_log and not stopped:
        writer.follow_log()
        writer.add_evaluation(worker.evaluate())
    if context.rank:
        return
    servers = {rank: collect_facts(rank) for rank in range(plan.num_workers, plan.world)}
    lost = set(servers[plan.num_workers]["lost"])
    others = {rank: collect_facts(rank) for rank in range(1, plan.num_workers) if rank not in lost}
    more = {
        **SaveTimes(**servers[plan.num_workers]["saves"]).facts(),
        "resumed_step": start or None,
        "failed_saves": len(worker.failed_saves),
        "failed_save_step": worker.failed_saves[-1] if worker.failed_saves else None,
    }
    writer.finish({0: own_facts, **others, **servers}, "preempted" if stopped else "done", clock, more)


class PushingRuntime(WorkerRuntime):
    """A worker computes with one copy of the weights; its gradients stay local until they are pushed."""

    @classmethod
    def run_rank(cls, config: Config, plan: Plan, context: WorkerContext) -> int:
        return run(config, plan, context)


RUNTIME = PushingRuntime
