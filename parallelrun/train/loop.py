"""The training loop: steps, evaluation, checkpoints, records."""

from __future__ import annotations

import time
from math import isfinite

from parallelrun.context import WorkerContext
from parallelrun.errors import EXIT_OK, EXIT_PREEMPTED, NumericsError, Problem, SaveFailed
from parallelrun.run_records import attempts, reshapes
from parallelrun.train import reshape
from parallelrun.train.build import Training
from parallelrun.train.checkpointing import Checkpoints, saves_after
from parallelrun.train.corruption.watch import watch_of
from parallelrun.train.first_steps import FirstSteps
from parallelrun.train.pace import PaceWatch
from parallelrun.train.profiler import StepProfiler
from parallelrun.train.recorder import Recorder
from parallelrun.train.reshape import Agreed, NextPlan
from parallelrun.train.schedules import LossScaler, learning_rate
from parallelrun.train.step import Evaluation, StepResult, measure, train_step
from parallelrun.train.step_record import StepRecord
from parallelrun.train.timing import StepClock

MAX_SKIPS = 20


def train(
    training: Training, context: WorkerContext, recorder: Recorder, before: NextPlan | None = None
) -> int | NextPlan:
    """Train from the resumed step to `config.steps`, or until the plan changes. Raises NumericsError.

    before: the change of plan after which `training` goes on. Returns the exit code or the next plan.
    """
    config = training.config
    scaler = before.scaler if before else LossScaler(config.precision, scaled=training.plan.precision.scaled)
    checkpoints = before.checkpoints if before else Checkpoints(training, scaler, context)
    start = checkpoints.go_on(training, before.step) if before else checkpoints.resume()
    training.data.begin_run(training, context, start)
    first_steps = FirstSteps(training.mesh, config, start, context.directory, training.plan.data.full_step)
    clock, profiler = StepClock(training), StepProfiler(training.mesh, config, context.directory)
    watch, pace = watch_of(training, scaler, context, start), PaceWatch(training, context)

    def before_update(training: Training) -> None:
        checkpoints.before_update(training)
        watch.before_update(training)

    skips, step = 0, start
    if context.rank == 0:
        attempts.first_step_begins(context.directory)
    began = time.perf_counter()
    while step < config.steps:
        step += 1
        context.heartbeat(step, "step")
        lr = learning_rate(config.optimizer, step, config.steps)
        watch.before_step(step)
        with first_steps.watch(step), profiler.watch(step), watch.recorded(), clock:
            stop = context.stop_requested() or checkpoints.have_failed()
            asks = stop or (context.rank == 0 and reshapes.is_asked(context.directory))
            result = train_step(training, step, lr, scaler, asks, before_update, clock)
        watch.after_update()
        pace.step(step, clock)
        try:
            watch.agree(result.applied)
            skips = check_finite(training, result, scaler, step, skips)
        except NumericsError:
            checkpoints.finish()
            if (back := watch.check(step, saves=False, finite=False)) == step:
                raise
            step = recorder.undo(back)
            continue
        scaler.update(result.applied)
        evaluation = _evaluate(training, context, step)
        recorder.step(
            StepRecord(step, result.loss, result.grad_norm, lr, result.applied, clock.seconds,
                       time.perf_counter() - began, evaluation.loss if evaluation else None, scaler.scale, clock.times,
                       evaluation.top1 if evaluation else None)
        )  # fmt: skip
        if (back := watch.check(step, saves=saves_after(config, step, result.stop))) < step:
            step = recorder.undo(back)
            continue
        agreed = reshape.agree(training, context, stop) if result.stop else Agreed(stops=False)
        try:
            checkpoints.after_step(step, agreed.stops)
        except SaveFailed:  # on all ranks alike; the records are complete all the same
            recorder.finish(first_steps.counted, "failed", {**checkpoints.facts(), **watch.facts()})
            raise
        if agreed.stops:
            recorder.finish(first_steps.counted, "preempted", {**checkpoints.facts(), **watch.facts()})
            return EXIT_PREEMPTED
        wanted = reshape.check(agreed.request, training, context, step) if agreed.request else None
        if wanted is not None:
            checkpoints.finish()
            recorder.close()
            return NextPlan(wanted, step, scaler, checkpoints)
    recorder.finish(first_steps.counted, "done", {**checkpoints.facts(), **watch.facts()})
    return EXIT_OK


def _evaluate(training: Training, context: WorkerContext, step: int) -> Evaluation | None:
    """Evaluate every `eval.every` steps and after the last step; return None after other steps."""
    config = training.config
    if step != config.steps and (config.eval.every == 0 or step % config.eval.every):
        return None
    context.heartbeat(step, "evaluate")
    return measure(training)


def check_finite(training: Training, result: StepResult, scaler: LossScaler, step: int, skips: int) -> int:
    """Return the number of steps skipped in a row. Raises NumericsError unless a lower loss scale can help."""
    if result.applied:
        return 0
    skips += 1
    overflow_is_expected = scaler.scaled and isfinite(result.loss)
    if overflow_is_expected and skips < MAX_SKIPS:
        return skips
    what = "loss" if not isfinite(result.loss) else "gradient"
    bad = [p.name for p in training.parameters if p.tensor.grad is not None and not p.tensor.grad.isfinite().all()]
    value = result.loss if what == "loss" else result.grad_norm
    reason = f"{skips} overflowing steps in a row" if overflow_is_expected else f"{what} is {value}"
    coordinate = " ".join(f"{axis}={index}" for axis, index in training.mesh.coordinate.items())
    raise NumericsError(
        Problem(
            f"step {step}: {reason}; the weights were not changed"
            + (f"; on rank {training.mesh.rank} ({coordinate}) first in the gradient of {bad[0]}" if bad else ""),
            command="lower optimizer.lr, or precision=fp32",
        )
    )
