"""The training loop: steps, evaluation, checkpoints, records."""

from __future__ import annotations

import time
from math import isfinite

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_OK, EXIT_PREEMPTED, NumericsError, Problem, SaveFailed
from parallelrun.report.records import attempts
from parallelrun.training.corruption.watch import CorruptionWatch
from parallelrun.training.loop.build import Training
from parallelrun.training.loop.checkpointing import Checkpoints, due
from parallelrun.training.loop.schedules import LossScaler, learning_rate
from parallelrun.training.loop.step import Evaluation, StepResult, measure, train_step
from parallelrun.training.metrics.first_steps import FirstSteps
from parallelrun.training.metrics.pace import PaceWatch
from parallelrun.training.metrics.profiler import StepProfiler
from parallelrun.training.metrics.recorder import Recorder
from parallelrun.training.metrics.step_records import StepRecord
from parallelrun.training.metrics.timing import StepClock

MAX_SKIPS = 20


def train(training: Training, context: WorkerContext, recorder: Recorder) -> int:
    """Train from the resumed step to `config.steps`; return the exit code. Raises NumericsError."""
    config = training.config
    scaler = LossScaler(config.precision, scaled=training.plan.precision.scaled)
    checkpoints = Checkpoints(training, scaler, context)
    step = checkpoints.resume()
    training.data.begin_run(training, context, step)
    loop = _Loop(training, context, recorder, scaler, checkpoints, step)
    if context.rank == 0:
        attempts.first_step_begins(context.directory)
    while step < config.steps:
        step += 1
        result = loop.step(step)
        if (good := loop.judge(step, result)) < step:
            step = recorder.undo(good)
        elif loop.save_or_stop(step, result):
            loop.finish("preempted")
            return EXIT_PREEMPTED
    loop.finish("done")
    return EXIT_OK


class _Loop:
    """The steps on this rank, and what watches, records and saves them. start: the last step before."""

    def __init__(
        self,
        training: Training,
        context: WorkerContext,
        recorder: Recorder,
        scaler: LossScaler,
        checkpoints: Checkpoints,
        start: int,
    ):
        config, mesh = training.config, training.mesh
        self._training, self._context, self._recorder = training, context, recorder
        self._scaler, self._checkpoints = scaler, checkpoints
        self._first_steps = FirstSteps(mesh, config, start, context.directory, training.plan.data.full_step)
        self._clock, self._profiler = StepClock(training), StepProfiler(mesh, config, context.directory)
        self._watch, self._pace = CorruptionWatch(training, scaler, context, start), PaceWatch(training, context)
        self._skips = 0
        self._began = time.perf_counter()

    def step(self, step: int) -> StepResult:
        """Take one step of training. result.stop: some rank has been asked to stop."""
        context, clock, watch = self._context, self._clock, self._watch
        context.heartbeat(step, "step")
        with watch.around_step(step), self._first_steps.watch(step), self._profiler.watch(step), clock:
            stop = context.stop_requested() or self._checkpoints.have_failed()
            result = train_step(
                self._training, step, self._learning_rate(step), self._scaler, stop, self._before_update, clock
            )
        self._pace.step(step, clock)
        return result

    def judge(self, step: int, result: StepResult) -> int:
        """Check the step and record it. Return its number, or that of the earlier step whose weights were restored.

        Raises NumericsError if the loss or a gradient is not finite and no corruption is the reason.
        """
        watch, config = self._watch, self._training.config
        try:
            self._skips = check_finite(self._training, result, self._scaler, step, self._skips)
        except NumericsError:
            self._checkpoints.finish()
            if (back := watch.check(step, saves=False, finite=False)) == step:
                raise
            return back
        self._scaler.update(result.applied)
        self._record(step, result)
        return watch.check(step, saves=due(config, step, result.stop))

    def save_or_stop(self, step: int, result: StepResult) -> bool:
        """Save what is due after the step. Return whether the run has been asked to stop after it."""
        try:
            self._checkpoints.after_step(step, result.stop)
        except SaveFailed:  # on all ranks alike; the records are complete all the same
            self.finish("failed")
            raise
        return result.stop

    def finish(self, status: str) -> None:
        """Complete the records of the run."""
        facts = {**self._checkpoints.facts(), **self._watch.facts()}
        self._recorder.finish(self._first_steps.counted, status, facts)

    def _learning_rate(self, step: int) -> float:
        config = self._training.config
        return learning_rate(config.optimizer, step, config.steps)

    def _before_update(self, training: Training) -> None:
        self._checkpoints.before_update()
        self._watch.before_update(training)

    def _record(self, step: int, result: StepResult) -> None:
        evaluation, clock = _evaluate(self._training, self._context, step), self._clock
        self._recorder.step(
            StepRecord(step, result.loss, result.grad_norm, self._learning_rate(step), result.applied, clock.seconds,
                       time.perf_counter() - self._began, evaluation.loss if evaluation else None, self._scaler.scale,
                       clock.times, evaluation.top1 if evaluation else None)
        )  # fmt: skip


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
    quantity = "loss" if not isfinite(result.loss) else "gradient"
    bad = [p.name for p in training.parameters if p.tensor.grad is not None and not p.tensor.grad.isfinite().all()]
    value = result.loss if quantity == "loss" else result.grad_norm
    reason = f"{skips} overflowing steps in a row" if overflow_is_expected else f"{quantity} is {value}"
    coordinate = " ".join(f"{axis}={index}" for axis, index in training.mesh.coordinate.items())
    raise NumericsError(
        Problem(
            f"step {step}: {reason}; the weights were not changed"
            + (f"; on rank {training.mesh.rank} ({coordinate}) first in the gradient of {bad[0]}" if bad else ""),
            command="lower optimizer.lr, or precision=fp32",
        )
    )
