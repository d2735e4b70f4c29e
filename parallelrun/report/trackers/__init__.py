"""Experiment trackers: the interface that each implements, and what a tracker is told about a run.

A tracker is a module that holds `TRACKER`, a subclass of `Tracker`. A package outside this repository adds its own
through the entry points `parallelrun.report.trackers`. It runs in a process of its own (`report.trackers.follow`),
which reads the run's records, so that no call of a library can delay or end the training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from parallelrun.base import registry
from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.base.packages import require
from parallelrun.report.records.read import is_number

FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"  # how a run has ended


@dataclass(frozen=True)
class TrackedRun:
    """A run as it begins.

    directory: the run directory; runs: the folder of all of them; project, name, group, tags: the keys `tracker.*`,
    with the name of the first run's directory for `name`. config: config.yaml without secrets. plan: degrees, and what
    is predicted: seconds of a step, bytes of the fullest rank; None where there is no prediction. identity:
    `Tracker.identity` of the run that this one continues, else None; resumed_step: the step from which it continues,
    else 0.
    """

    directory: Path
    runs: Path
    project: str
    name: str
    group: str | None
    tags: tuple[str, ...]
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    identity: Mapping[str, Any] | None = None
    resumed_step: int = 0


class Tracker(ABC):
    """One run in an experiment tracker. Any method may raise: the user is told once, and the training goes on.

    library: the module that must be installed; extra: the extra of parallelrun that installs it. takes_back_steps: it
    forgets the steps beyond `resumed_step` when a run continues; else no step is logged twice.
    """

    library: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    takes_back_steps: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, run: TrackedRun):
        """Start a run with its configuration and plan, or go on with the one of `run.identity`."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """JSON data by which a later process continues this tracker's run. It must hold no secret."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step. Steps ascend."""

    def flush(self) -> None:  # noqa: B027 (optional)
        """Make visible what was logged; called a few times a second."""

    @abstractmethod
    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run: `finished`, `failed` or `interrupted`. summary: summary.json as far as there is one, without
        secrets, with `exit_code` and `error`."""


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker. Raises KeyError for an unknown name, ImportError for a broken plug-in."""
    tracker: type[Tracker] = registry.load("trackers", name).TRACKER
    return tracker


def check(names: Iterable[str]) -> None:
    """Raise EnvironmentProblem if the library of a tracker is not installed, or a plug-in cannot be imported."""
    for name in names:
        option = f"tracker={name}"
        try:
            wanted = tracker_class(name)
        except (ImportError, AttributeError) as error:
            message = f"{option}: its module cannot be imported: {error}"
            raise EnvironmentProblem(Problem(message, "tracker", "tracker=none")) from error
        if wanted.library:
            require(wanted.library, option, "tracker", "tracker=none", wanted.extra)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row of metrics.jsonl, without `step` and `schema`."""
    return {name: value for name, value in row.items() if name not in ("step", "schema") and is_number(value)}
