"""Runs one function on the ranks of a plan, in a directory of its own, and waits for it: no run is recorded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallelrun.base.context import ASKED
from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EnvironmentProblem
from parallelrun.base.records import write_json, write_text
from parallelrun.base.stop_signals import Terminated
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host import directory
from parallelrun.launch.host.job import Job
from parallelrun.launch.host.output import log_path
from parallelrun.launch.ranks import supervisor
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import freeze


class TaskFailed(EnvironmentProblem):
    """A rank of a task has failed for no reason that it explains. log: what it has written."""

    def __init__(self, message: str, log: Path):
        super().__init__(message)
        self.log = log


@contextmanager
def task_root(name: str) -> Iterator[Path]:
    """A temporary directory for tasks. It is removed at the end unless a TaskFailed leaves the block: then its logs
    are what tells why, and the error says where they are."""
    root = Path(tempfile.mkdtemp(prefix=f"parallelrun-{name}-"))
    try:
        yield root
    except TaskFailed as failed:
        raise TaskFailed(f"{failed} (its log: {failed.log})", failed.log) from None
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    shutil.rmtree(root, ignore_errors=True)


def run_task(root: Path, config: Config, plan: Plan, worker: str, asked: Mapping[str, Any] | None = None) -> Path:
    """Run `worker` (`module:function`) on every rank; return the directory that the ranks have written to.

    root: where that directory is made. asked: what the ranks read from `asked.json` there. Raises TaskFailed if a
    rank fails, EnvironmentProblem if it explains why or the ranks end otherwise; after a signal KeyboardInterrupt, or
    Terminated if it asked to stop.
    """
    folder = directory.create(root, worker.rpartition(":")[2])
    write_text(folder / "config.yaml", freeze(config, plan))
    if asked is not None:
        write_json(folder / ASKED, dict(asked))
    outcome = supervisor.supervise(Job(config, plan, folder, worker))
    if outcome.cause is not None:
        rank = outcome.cause.rank
        message = f"rank {rank} of {plan.world}: {outcome.cause.what}"
        if outcome.cause.problems:  # the log tells no more
            raise EnvironmentProblem(message)
        raise TaskFailed(message, log_path(folder, rank))
    if outcome.exit_code == EXIT_TERMINATED:
        raise Terminated("SIGTERM")
    if outcome.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.exit_code != EXIT_OK:
        raise EnvironmentProblem(f"the ranks ended with exit code {outcome.exit_code}")
    return folder
