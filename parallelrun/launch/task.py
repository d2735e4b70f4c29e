"""Runs one function on the ranks of a plan, in a directory of its own, and waits for it: no run is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallelrun.config.schema import Config
from parallelrun.context import ASKED
from parallelrun.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EnvironmentProblem
from parallelrun.launch import directory, supervisor
from parallelrun.launch.rank import Job
from parallelrun.plan.freeze import freeze
from parallelrun.plan.structure import Plan
from parallelrun.records import write_json, write_text


def run_task(root: Path, config: Config, plan: Plan, worker: str, asked: Mapping[str, Any] | None = None) -> Path:
    """Run `worker` (`module:function`) on every rank; return the directory that the ranks have written to.

    root: where that directory is made. asked: what the ranks read from `asked.json` there. Raises EnvironmentProblem if
    a rank fails, KeyboardInterrupt after a signal.
    """
    folder = directory.create(root, worker.rpartition(":")[2])
    write_text(folder / "config.yaml", freeze(config, plan))
    if asked is not None:
        write_json(folder / ASKED, dict(asked))
    outcome = supervisor.supervise(Job(config, plan, folder, worker))
    if outcome.cause is not None:
        raise EnvironmentProblem(f"rank {outcome.cause.rank} of {plan.world}: {outcome.cause.what}")
    if outcome.exit_code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        raise KeyboardInterrupt
    if outcome.exit_code != EXIT_OK:
        raise EnvironmentProblem(f"the ranks ended with exit code {outcome.exit_code}")
    return folder
