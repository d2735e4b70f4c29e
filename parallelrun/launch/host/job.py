"""What a launcher gives its ranks: the run to launch, the settings of one rank, and how to talk to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.report.records import attempts

WORKER = "parallelrun.launch.ranks.worker:run"


@dataclass(frozen=True)
class ConsoleOptions:
    """How a run talks to the user. overrides: for the command that resumes the run; verbose: show tracebacks."""

    overrides: tuple[str, ...] = ()
    verbose: bool = False


@dataclass(frozen=True)
class Job:
    """A run to launch. directory: the run directory, with config.yaml in it; worker: `module:function`; options: how to
    talk to the user; attempt: from 1, higher after a restart; prepared: see `WorkerContext`."""

    config: Config
    plan: Plan
    directory: Path
    worker: str = WORKER
    options: ConsoleOptions = field(default_factory=ConsoleOptions)
    attempt: int = 1
    prepared: Any = None

    @property
    def config_file(self) -> Path:
        """The frozen configuration from which ranks start that are not forked."""
        return attempts.config_file(self.directory, self.attempt)


@dataclass(frozen=True)
class RankSettings:
    """Settings that differ between ranks. threads: compute threads, 0 for OMP_NUM_THREADS."""

    rank: int
    local_rank: int
    threads: int = 0
