"""Starting a run for the command line: launched on this host, inline, or attached to another launcher."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from parallelrun import definitions, trackers
from parallelrun.checkpoint.resume import AUTO, Chosen, choose, hold, resumed_from
from parallelrun.config.schema import Config
from parallelrun.data import open_dataset
from parallelrun.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, EXIT_TERMINATED
from parallelrun.launch import (
    attach,
    directory,
    environment,
    failure,
    guard,
    output,
    preflight,
    rank,
    reattach,
    restarts,
    supervisor,
    tf_config,
)
from parallelrun.launch.directory import Status
from parallelrun.launch.environment import Attached
from parallelrun.launch.failure import ConsoleOptions, Failure
from parallelrun.launch.failure_detection import Watchdog
from parallelrun.launch.heartbeat import HeartbeatFile
from parallelrun.launch.memory_folder import check as check_memory_folder
from parallelrun.launch.memory_folder import keep, memory_folder
from parallelrun.launch.outcome import Outcome, conclude
from parallelrun.launch.rank import STOP_SIGNALS, Job, RankSettings
from parallelrun.launch.supervisor import signal_handlers
from parallelrun.plan.freeze import filled
from parallelrun.plan.structure import Plan
from parallelrun.trackers.processes import following
from parallelrun.trackers.state import carry_over
from parallelrun.wording import counted, print_note


def start(
    config: Config,
    plan: Plan,
    argv: Sequence[str],
    overrides: Sequence[str],
    run_root: Path | None = None,
    worker: str = rank.WORKER,
    created: Callable[[Path], None] | None = None,
) -> int:
    """Create the run directory and run `plan` to its end. Return the exit code.

    argv: for the manifest. overrides: for the command that resumes the run. run_root: use exactly this directory
    (`hydra.run.dir`, a point of a sweep). worker: `module:function`. created: is called with the run directory. Raises
    ConfigError and EnvironmentProblem before any process is started.
    """
    attached = environment.detect(os.environ)
    options = ConsoleOptions(tuple(overrides), "-v" in argv or "--verbose" in argv)
    memory, step = environment.memory_of_hosts(os.environ) if attached else (None, None)
    asked = Job(config, plan, Path(), worker, options, memory=memory, memory_step=step)
    job = _prepare(asked, argv, attached, run_root)
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
        keeps = job.config.checkpoint.memory_every > 0
        with guard.status_of(job.directory, guard.LAUNCHER_GONE), memory_folder(keeps) as memory:
            return _launch(replace(job, memory=memory), config, run_root)


def _launch(job: Job, asked: Config, run_root: Path | None) -> int:
    """Run the ranks on this host to their end and write the final status. Return the exit code."""
    status = Status(job.directory)
    status.running()
    try:
        # a point of a sweep is never inline: its crash must not end the sweep, and its threads would forbid later forks
        if job.config.restarts:
            outcome = restarts.supervise(job, asked)
        else:
            outcome = _inline(job) if job.plan.world == 1 and run_root is None else supervisor.supervise(job)
    except KeyboardInterrupt:
        outcome = Outcome(EXIT_INTERRUPTED, note="interrupted")
    except BaseException as error:
        status.ended(EXIT_RUN_FAILED, f"{type(error).__name__}: {error}")
        raise
    if outcome.exit_code != EXIT_OK:
        keep(job.memory, job.directory)
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
    name = directory.name_of(config, plan)
    only_once = attached.source if attached and not reattach.most_restarts(os.environ) else ""
    notes = preflight.check(config, plan, attached) + restarts.notes(config, only_once)
    notes += check_memory_folder(config, plan, attached)
    trackers.check(config.tracker.use)
    has_dataset = not definitions.model(config).is_lesson
    print(starting(plan.world, config.dataset.name if has_dataset else None), file=sys.stderr, flush=True)
    dataset = open_dataset(config, plan.spec) if has_dataset else None
    found = choose(config, plan) if config.verb == "run" else None
    if found and _is_finished(found, config):
        return None
    notes += definitions.dataset(config).notes(config, plan.spec, dataset) if dataset else []
    if config.init.weights is not None and found is None:  # the ranks would find the same problems, one by one
        from parallelrun.exchange import source

        source.initial_weights(replace(config, resume=None), plan.spec)
        notes += source.notes_on_initial(config)
    for note in [*notes, *preflight.disk_shortage(config, plan, run_root or Path(config.runs))]:
        print_note(f"note: {note}")
    os.umask(0o077)
    folder = directory.create(Path(config.runs), name, run_root)
    resumed = None
    if found:
        config, found = _held(config, plan, found, folder)
        carry_over(found.path.parents[1], folder, config.tracker.use, found.index.step)
    elif config.resume == AUTO:
        print(f"resume=auto: no checkpoint of this training under {config.runs}: starting fresh", file=sys.stderr)
        config = replace(config, resume=None)
    if found and dataset:
        resumed, warning = resumed_from(found, config.dataset.name, dataset.fingerprint)
        if warning:
            print_note(f"warning: {warning}")
    directory.describe(folder, config, plan, argv, job.options.overrides, resumed)
    job = replace(job, config=filled(config, plan), directory=folder)
    if attached is not None:
        reattach.remember(job)
    return job


def _is_finished(found: Chosen, config: Config) -> bool:
    """Return whether the checkpoint to resume from is that of the last step or a later one, and tell the user."""
    step = found.index.step
    if step >= config.steps:
        left = f"nothing is left to do (steps={2 * step} trains on)"
        where = (
            f"step {step} of {config.steps}" if step == config.steps else f"step {step}, beyond steps={config.steps}"
        )
        print(f"finished: {found.path} is {where}, {left}")
    elif config.resume == AUTO:
        print(f"resume=auto: continues from step {step}, {found.path}", file=sys.stderr)
    return step >= config.steps


def _held(config: Config, plan: Plan, found: Chosen, folder: Path) -> tuple[Config, Chosen]:
    """Return `config` with `resume` set to a checkpoint that cannot be deleted before all ranks have read it, and the
    original checkpoint. The run that saved it may be alive, and may have replaced it by a newer one."""
    while (held := hold(found, folder)) is None:
        again = choose(config, plan)
        assert again is not None, "resume=auto has found this run before"
        found = again
    return replace(config, resume=str(held)), found


def _inline(job: Job) -> Outcome:
    """Run the worker of a single rank in this process, watched by a thread.

    A stop signal asks the worker to stop after its step; a second one interrupts it.
    """
    heartbeats, terminal = HeartbeatFile(1), sys.stderr

    def stop(number: int, _frame: object) -> None:
        if heartbeats.stop_requested():
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number).name)
        heartbeats.request_stop()

    def on_hang(cause: Failure) -> None:
        conclude(Outcome(cause.exit_code, cause), job, terminal)

    with signal_handlers(STOP_SIGNALS, stop), output.copied(job.directory, 0) as log:
        with Watchdog(heartbeats, 0, job.config.timeout_s, log, on_hang, Status(job.directory)):
            code = rank.serve(job, RankSettings(0, 0), heartbeats)
    outcome = Outcome(code, None, "", heartbeats.read(0).step, heartbeats.failed_save())
    if code == EXIT_INTERRUPTED:
        terminated = heartbeats.stop_requested()
        note = f"{'terminated' if terminated else 'interrupted'} at step {outcome.step}"
        return replace(outcome, exit_code=EXIT_TERMINATED if terminated else code, note=note)
    return replace(outcome, cause=failure.recorded(job.directory, heartbeats, 0, os.getpid()))
