"""The door from the command line: a composed config and its plan become a run, launched, inline or attached."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from parallelrun import definitions
from parallelrun.checkpoint.resume import AUTO, Chosen, choose, hold, resumed_from
from parallelrun.config.schema import Config
from parallelrun.data import open_dataset
from parallelrun.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_RUN_FAILED, EXIT_TERMINATED
from parallelrun.launch import (
    attach,
    directory,
    disk,
    environment,
    failure,
    output,
    preflight,
    rank,
    supervisor,
    tf_config,
)
from parallelrun.launch.board import Board
from parallelrun.launch.failure import Failure
from parallelrun.launch.processes import Job
from parallelrun.launch.status import Status
from parallelrun.launch.supervisor import Outcome
from parallelrun.launch.watchdog import Watchdog
from parallelrun.plan.structure import Plan
from parallelrun.train import tracker
from parallelrun.wording import counted


@dataclass(frozen=True)
class Command:
    """How the user asked for the run. argv: for the manifest; overrides: for the resume line."""

    argv: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def verbose(self) -> bool:
        return "-v" in self.argv or "--verbose" in self.argv


def start(
    config: Config,
    plan: Plan,
    argv: Sequence[str],
    overrides: Sequence[str],
    run_root: Path | None = None,
    worker: str = rank.WORKER,
    method: str = "",
    created: Callable[[Path], None] | None = None,
) -> int:
    """Make the run directory and run `plan` to its end; the exit code.

    run_root: the very directory to use (`hydra.run.dir`, a sweep's point). worker: the worker door, `module:function`.
    method: fork | exec, empty for whichever fits. created: is told the run directory.
    Raises ConfigError and EnvironmentProblem before any process exists.
    """
    command = Command(tuple(argv), tuple(overrides))
    attached = environment.detect(os.environ)
    job = _prepare(config, plan, command, attached, run_root, worker, method)
    if job is None:
        if attached:
            attach.abandon(attached, EXIT_OK)
        return EXIT_OK
    if created:
        created(job.directory)
    if attached:
        return attach.lead(attached, job, command.argv, command.overrides, command.verbose)
    status = Status(job.directory)
    status.running()
    try:
        # a sweep's point is never inline: its crash must not end the sweep, nor its threads forbid the next one's fork
        inline = plan.world == 1 and run_root is None
        outcome = _inline(job, command) if inline else supervisor.supervise(job)
    except KeyboardInterrupt:
        outcome = Outcome(EXIT_INTERRUPTED, note="interrupted")
    except BaseException as error:
        status.ended(EXIT_RUN_FAILED, f"{type(error).__name__}: {error}")
        raise
    conclude(outcome, job, command.overrides, command.verbose)
    return outcome.exit_code


def conclude(outcome: Outcome, job: Job, overrides: Sequence[str], verbose: bool) -> None:
    """The last status, and on a failure the last words on the screen."""
    status, cause = Status(job.directory, failed_save_step=outcome.failed_save_step), outcome.cause
    status.step = max(outcome.step, cause.step if cause else 0)
    status.ended(outcome.exit_code, cause.what if cause else outcome.note or None, cause.rank if cause else None)
    if cause:
        say(failure.block(cause, job.plan, job.directory, overrides, verbose))
    elif outcome.note:
        saved = failure.last_checkpoint(job.directory)
        say([f"{outcome.note}; last good checkpoint: {f'step {saved[0]}' if saved else 'none'}; {job.directory}"])
    elif outcome.exit_code == EXIT_PREEMPTED:
        say(["preempted", *failure.how_to_resume(job.directory, overrides)])


def say(lines: Sequence[str]) -> None:
    """Lines for the user, below whatever progress line is on the screen."""
    lead = "\n" if sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):  # a closed terminal, or a file on a full disk
        print(lead + "\n".join(lines), file=sys.stderr, flush=True)


def starting(world: int, dataset: str | None) -> str:
    """What is said at once, before data sets are read and ranks import torch."""
    return f"starting {counted(world, 'rank')}" + (f", loading data ({dataset})" if dataset else "")


def _prepare(
    config: Config,
    plan: Plan,
    command: Command,
    attached: environment.Attached | None,
    run_root: Path | None,
    worker: str,
    method: str,
) -> Job | None:
    """Everything that can be refused, refused; then the run directory with what is known before the first step.

    None where nothing is left to do: the run that would go on has finished, which is said.
    """
    if attached is None:
        tf_config.refuse_other_hosts(config, command.argv, os.uname().nodename)
    name = directory.name_of(config, plan)
    notes = preflight.check(config, plan, attached)
    tracker.check(config.tracker)
    has_dataset = not definitions.model(config).is_lesson
    print(starting(plan.world, config.dataset.name if has_dataset else None), file=sys.stderr, flush=True)
    dataset = open_dataset(config, plan.spec) if has_dataset else None
    found = choose(config, plan) if config.verb == "run" else None
    if found and _is_finished(found, config):
        return None
    notes += definitions.dataset(config).notes(config, plan.spec, dataset) if dataset else []
    for note in [*notes, *disk.shortage(config, plan, run_root or Path(config.runs))]:
        print(f"note: {note}", file=sys.stderr)
    os.umask(0o077)
    place = directory.create(Path(config.runs), name, run_root)
    resumed = None
    if found:
        config, found = _holding(config, plan, found, place)
    elif config.resume == AUTO:
        print(f"resume=auto: no checkpoint of this training under {config.runs}: starting fresh", file=sys.stderr)
        config = replace(config, resume=None)
    if found and dataset:
        resumed, warning = resumed_from(found, config.dataset.name, dataset.fingerprint)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
    directory.describe(place, config, plan, command.argv, command.overrides, resumed)
    return Job(config, plan, place, worker, method)


def _is_finished(found: Chosen, config: Config) -> bool:
    """Whether the checkpoint to go on from is that of the last step, or beyond; said if so."""
    step = found.index.step
    if step >= config.steps:
        left = f"nothing is left to do (steps={2 * step} trains on)"
        print(f"finished: {found.path} is step {step} of {config.steps}, {left}")
    elif config.resume == AUTO:
        print(f"resume=auto: goes on from step {step}, {found.path}", file=sys.stderr)
    return step >= config.steps


def _holding(config: Config, plan: Plan, found: Chosen, place: Path) -> tuple[Config, Chosen]:
    """(`config` for all ranks, where `resume` is one checkpoint that nobody deletes before they have read it; that of
    the run that saved it, which may be alive and by now have saved a newer one)."""
    held = hold(found, place)
    while held is None:
        again = choose(config, plan)
        assert again is not None, "resume=auto has found this run before"
        found = again
        held = hold(found, place)
    return replace(config, resume=str(held)), found


def _inline(job: Job, command: Command) -> Outcome:
    """One rank: the worker runs in this process, watched by a thread."""
    board = Board.fresh(1)
    place = rank.Place(0, 1, 0, 0, job.directory, job.worker, keeps_terminal=True)
    terminal = sys.stderr
    with _stopping(board), output.copied(job.directory, 0) as log:

        def on_hang(cause: Failure) -> None:
            sys.stderr = terminal
            conclude(Outcome(cause.exit_code, cause, step=cause.step), job, command.overrides, command.verbose)

        with Watchdog(board, 0, job.config.timeout_s, log, on_hang, Status(job.directory)):
            code = rank.serve(place, job.config, job.plan, board, None)
    step, failed_save, told = board.read(0).step, board.failed_save(), board.told(0)
    if code == EXIT_INTERRUPTED:
        code = EXIT_TERMINATED if board.stop_requested() else code
        note = f"{'terminated' if board.stop_requested() else 'interrupted'} at step {step}"
        return Outcome(code, note=note, step=step, failed_save_step=failed_save)
    cause = failure.read(job.directory, 0)
    if cause is None and told is not None:
        cause = Failure(0, told[2], told[0], time.monotonic_ns(), pid=os.getpid(), step=step)
    return Outcome(code, cause, step=step, failed_save_step=failed_save)


@contextmanager
def _stopping(board: Board):
    """SIGTERM, SIGHUP and SIGUSR1 ask the inline worker to stop after its step; the handlers are put back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def stop(number: int, _frame: object) -> None:
        if board.stop_requested():
            signal.signal(number, signal.SIG_DFL)
            raise KeyboardInterrupt(signal.Signals(number).name)
        board.request_stop()

    before = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
