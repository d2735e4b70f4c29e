"""How a run ended: the exit code, the final status, and the message for the user."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from typing import TextIO

from parallelrun.base.errors import EXIT_PREEMPTED
from parallelrun.launch.failures import failure
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.job import Job


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended. cause: the root cause, if a rank failed; note: how the user ended the run; why_not: why
    a run that may restart is not restarted."""

    exit_code: int
    cause: Failure | None = None
    note: str = ""
    step: int = 0
    failed_save_step: int = 0
    why_not: str = ""


def conclude(outcome: Outcome, job: Job, terminal: TextIO | None = None) -> None:
    """Write the final status; print the error, the interruption, or how to resume a preempted run.

    terminal: where to print, by default stderr.
    """
    cause, screen = outcome.cause, terminal or sys.stderr
    status = Status(job.directory, max(outcome.step, cause.step if cause else 0), outcome.failed_save_step)
    error = "; ".join(filter(None, (cause.what if cause else outcome.note, outcome.why_not)))
    stalled = asdict(cause.stall) if cause and cause.stall else None
    status.ended(outcome.exit_code, error or None, cause.rank if cause else None, stalled)
    lines = []
    if cause:
        lines = failure.message(cause, job.plan, job.directory, job.options)
    elif outcome.note:
        saved = failure.last_checkpoint(job.directory)
        lines = [f"{outcome.note}; last good checkpoint: {f'step {saved[0]}' if saved else 'none'}; {job.directory}"]
    elif outcome.exit_code == EXIT_PREEMPTED:
        lines = ["preempted", *failure.how_to_resume(job.directory, job.options)]
    if outcome.why_not:
        lines.append(f"  not restarted: {outcome.why_not}")
    if lines:
        before = "\n" if screen.isatty() else ""  # leave a progress line as it is
        with contextlib.suppress(OSError):  # a closed terminal, or a file on a full disk
            print(before + "\n".join(lines), file=screen, flush=True)
