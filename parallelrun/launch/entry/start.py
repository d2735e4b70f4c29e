"""Starting a run for the command line: launched on this host, inline, or attached to another launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from parallelrun.base import elapsed, stop_signals
from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, EXIT_TERMINATED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.base.wording import counted, print_note
from parallelrun.checkpoint.data import check_data, resumed_from
from parallelrun.checkpoint.resume import AUTO, Chosen, choose, hold
from parallelrun.config.schema.run_schema import Config
from parallelrun.data import open_dataset
from parallelrun.launch.entry import attach, reattach
from parallelrun.launch.failures import failure, guard
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.failures.outcome import Outcome, conclude
from parallelrun.launch.failures.watchdog import Watchdog
from parallelrun.launch.host import directory, environment, output, preflight, tf_config
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.job import WORKER, ConsoleOptions, Job, RankSettings
from parallelrun.launch.ranks import processes, rank, restarts, supervisor
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model import definitions
from parallelrun.planner.resolve.freeze import filled
from parallelrun.report import trackers
from parallelrun.report.records.rows import writer_of
from parallelrun.report.trackers.processes import following
from parallelrun.report.trackers.state import carry_over


def start(
    config: Config,
    plan: Plan,
    argv: Sequence[str],
    overrides: Sequence[str],
    run_root: Path | None = None,
    worker: str = WORKER,
    created: Callable[[Path], None] | None = None,
) -> int:
    """Create the run directory and run `plan` to its end. Return the exit code.

    argv: for the manifest. overrides: for the command that resumes the run. run_root: use exactly this directory
    (`hydra.run.dir`, a point of a sweep). worker: `module:function`. created: is called with the run directory. Raises
    ConfigError and EnvironmentProblem before any process is started.
    """
    attached = environment.detect(os.environ)
    options = ConsoleOptions(tuple(overrides), "-v" in argv or "--verbose" in argv)
    job = _prepare(Job(config, plan, Path(), worker, options), argv, attached, run_root)
    if job is None:
        if attached:
            attach.abandon(attached, EXIT_OK)
        return EXIT_OK
    if created:
        created(job.directory)
    names = job.config.tracker.use if job.config.verb == "run" else []
    with following(job.directory, names, job.config.tracker.timeout_s):
        if attached:
            return attach.lead(attached, job, argv)
        with guard.status_of(job.directory, guard.LAUNCHER_GONE):
            return _launch(job, config, run_root)


def _launch(job: Job, requested: Config, run_root: Path | None) -> int:
    """Run the ranks on this host to their end and write the final status. Return the exit code."""
    signals: list[int] = []  # one that arrives when the ranks have ended does not keep their status from being written
    with stop_signals.handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        status = Status(job.directory)
        status.running()
        try:
            # a point of a sweep is never inline: its crash must not end the sweep, nor its threads forbid later forks
            if job.config.restarts:
                outcome = restarts.supervise(job, requested, signals)
            elif job.plan.world == 1 and run_root is None:
                outcome = _inline(job, signals)
            else:
                outcome = supervisor.supervise(job, signals)
        except KeyboardInterrupt:
            outcome = _interrupted(signals, 0)
        except BaseException as error:
            status.ended(EXIT_RUN_FAILED, f"{type(error).__name__}: {error}")
            raise
        conclude(outcome, job)
        return outcome.exit_code


def starting(world: int, dataset: str | None) -> str:
    """Return the first line on the screen, printed before datasets are read and ranks import torch."""
    return f"starting {counted(world, 'rank')}" + (f", loading data ({dataset})" if dataset else "")


def _prepare(job: Job, argv: Sequence[str], attached: Attached | None, run_root: Path | None) -> Job | None:
    """Make all checks, then create the run directory and write what is known before the first step. Return `job` with
    the directory and the resolved `resume`; None, after a message, if the run to resume has already finished."""
    config, plan = job.config, job.plan
    if attached is None:
        tf_config.refuse_other_hosts(config, argv, os.uname().nodename)
    if attached is not None and (before := reattach.earlier(Path(config.runs).expanduser())) is not None:
        print(starting(plan.world, None), file=sys.stderr, flush=True)
        return reattach.continued(replace(job, config=filled(config, plan)), before)
    only_once = attached.source if attached and not reattach.most_restarts(os.environ) else ""
    notes = preflight.check(config, plan, attached) + restarts.notes(config, only_once)
    trackers.check(config.tracker.use)
    if config.init.weights is not None and config.resume is None:
        from parallelrun.checkpoint.exchange import paths

        paths.check_paths(config.init.weights, "init.from")
    has_dataset = not definitions.model(config).is_lesson
    print(starting(plan.world, config.dataset.name if has_dataset else None), file=sys.stderr, flush=True)
    with elapsed.shown("loading data"):
        dataset = open_dataset(config, plan.spec) if has_dataset else None
    checkpoint = choose(config, plan) if config.verb == "run" else None
    if checkpoint and _is_finished(checkpoint, config):
        return None
    if checkpoint and dataset:
        check_data(checkpoint.index.extra, dataset, config, checkpoint.path)
    notes += definitions.dataset(config).notes(config, plan.spec, dataset) if dataset else []
    if checkpoint is None:
        notes += _notes_on_initial_weights(config, plan)
    for note in [*notes, *preflight.disk_shortage(config, plan, run_root or Path(config.runs))]:
        print_note(f"note: {note}")
    os.umask(0o077)
    folder = directory.create(Path(config.runs), directory.name_of(config, plan), run_root)
    resumed = None
    if checkpoint:
        config, checkpoint = _held(config, plan, checkpoint, folder)
        _carry_trackers(checkpoint, folder, config)
    elif config.resume == AUTO:
        print(f"resume=auto: no checkpoint of this training under {config.runs}: starting fresh", file=sys.stderr)
        config = replace(config, resume=None)
    if checkpoint and dataset:
        resumed, warning = resumed_from(checkpoint.path, checkpoint.index.extra, checkpoint.index.step, dataset)
        if warning:
            print_note(f"warning: {warning}")
    directory.describe(folder, config, plan, argv, job.options.overrides, resumed)
    job = replace(job, config=filled(config, plan), directory=folder)
    if attached is not None:
        reattach.remember(job)
    return job


def _notes_on_initial_weights(config: Config, plan: Plan) -> list[str]:
    """Check `init.from`, where the ranks would find the same problems one by one, and return notes on it."""
    if config.init.weights is None:
        return []
    from parallelrun.checkpoint.exchange import source

    if weights := source.initial_weights(replace(config, resume=None), plan.spec):
        weights.verify()
    return source.notes_on_initial(config)


def _carry_trackers(checkpoint: Chosen, folder: Path, config: Config) -> None:
    """Let the trackers continue the record of the resumed run, unless that run still trains."""
    resumed_run, step = checkpoint.path.parents[1], checkpoint.index.step
    if writer := writer_of(resumed_run):
        message = f"{resumed_run} still trains: {writer} writes it. This run trains the steps after its step {step}"
        print_note(f"warning: {message} a second time, and its trackers begin a record of their own")
    else:
        carry_over(resumed_run, folder, config.tracker.use, step)


def _is_finished(checkpoint: Chosen, config: Config) -> bool:
    """Return whether the checkpoint to resume from is that of the last step or a later one, and tell the user."""
    step = checkpoint.index.step
    if step >= config.steps:
        left = f"nothing is left to do (steps={2 * step} trains on)"
        where = (
            f"step {step} of {config.steps}" if step == config.steps else f"step {step}, beyond steps={config.steps}"
        )
        print(f"finished: {checkpoint.path} is {where}, {left}")
    elif config.resume == AUTO:
        print(f"resume=auto: continues from step {step}, {checkpoint.path}", file=sys.stderr)
    return step >= config.steps


def _held(config: Config, plan: Plan, checkpoint: Chosen, folder: Path) -> tuple[Config, Chosen]:
    """Return `config` with `resume` set to a checkpoint that cannot be deleted before all ranks have read it, and the
    original checkpoint. The run that saved it may be alive, and may have replaced it by a newer one."""
    while (linked := hold(checkpoint, folder)) is None:
        again = choose(config, plan)
        assert again is not None, "resume=auto has found this run before"
        checkpoint = again
    return replace(config, resume=str(linked)), checkpoint


def _inline(job: Job, signals: list[int]) -> Outcome:
    """Run the worker of a single rank in this process, watched by a thread. signals: those that have arrived.

    A stop signal asks the worker to stop after its step; a second one, or SIGINT, interrupts it.
    """
    heartbeats, terminal = HeartbeatFile(1), sys.stderr

    def stop(number: int, _frame: object) -> None:
        signals.append(number)
        heartbeats.request_stop()
        if len(signals) > 1 or number == signal.SIGINT:
            if len(signals) > 1:
                signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number).name)

    def on_hang(cause: Failure) -> None:
        conclude(Outcome(cause.exit_code, cause), job, terminal)

    with (
        elapsed.shown(starting(1, None), partial(heartbeats.has_begun, 0)),
        stop_signals.handlers((signal.SIGINT, *STOP_SIGNALS), stop),
        output.copied(job.directory, 0) as log,
    ):
        with stop_signals.postponed():
            processes.import_all(["torch", *processes.modules(job.config, job.plan, job.worker)])
        with Watchdog(heartbeats, 0, job.config.timeout_s, log, on_hang, Status(job.directory)):
            code = EXIT_INTERRUPTED if signals else rank.serve(job, RankSettings(0, 0), heartbeats)
    step, failed_save_step = heartbeats.read(0).step, heartbeats.failed_save()
    if code == EXIT_INTERRUPTED:
        return replace(_interrupted(signals, step), failed_save_step=failed_save_step)
    return Outcome(code, failure.recorded(job.directory, heartbeats, 0, os.getpid()), "", step, failed_save_step)


def _interrupted(signals: Sequence[int], step: int) -> Outcome:
    """Return the outcome of a run that the last of `signals` has ended at once."""
    if signals and signals[-1] != signal.SIGINT:
        return Outcome(EXIT_TERMINATED, note=f"terminated at step {step}", step=step)
    return Outcome(EXIT_INTERRUPTED, note=f"interrupted at step {step}", step=step)
