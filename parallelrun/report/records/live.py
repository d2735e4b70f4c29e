"""The state of a live run: status.json, the last row of metrics.jsonl and its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.report.records.find import CONFIG, EVENTS, STATUS
from parallelrun.report.records.read import METRICS, flatten, read_object, read_yaml
from parallelrun.report.records.rows import RUNNING, STARTING, age_s, last_row, read_row
from parallelrun.report.sweeps.sweep_rows import read_jsonl

_EVENTS_SHOWN = 5
_STEPS = {"verify": ("verify.steps",), "bench": ("bench.warmup", "bench.steps")}  # verb -> the keys of its steps


@dataclass(frozen=True)
class LiveRun:
    """A run at one moment.

    state, error: as of `rows.RunRow`; steps: of the whole run, 0 if unknown; ranks: rows of status.json; row: the last
    one of metrics.jsonl; events: the last ones; age_s: since status.json was written.
    """

    directory: Path
    state: str
    error: str
    status: Mapping[str, Any]
    steps: int
    ranks: Sequence[Mapping[str, Any]]
    row: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    age_s: float | None

    @property
    def is_live(self) -> bool:
        return self.state in (RUNNING, STARTING)

    @property
    def step(self) -> int:
        """The last step that any rank has begun, or that was recorded."""
        begun = [int(rank.get("step") or 0) for rank in self.ranks]
        return max([*begun, int(self.status.get("step") or 0), int(self.row.get("step") or 0)])

    def document(self) -> dict[str, Any]:
        """Return the run for --json."""
        return {
            "directory": self.directory,
            "state": self.state,
            "error": self.error or None,
            "step": self.step,
            "steps": self.steps or None,
            "status": self.status,
            "metrics": self.row,
            "events": self.events,
            "age_s": self.age_s,
        }


def read_live(directory: Path) -> LiveRun:
    """Return a run as it is now. Raises ParallelrunError (exit 4) for broken files."""
    status, row = read_object(directory / STATUS), read_row(directory)
    ranks = [rank for rank in status.get("ranks") or () if isinstance(rank, dict) and isinstance(rank.get("rank"), int)]
    return LiveRun(
        directory,
        row.state,
        row.error,
        status,
        _steps(read_yaml(directory / CONFIG)),
        ranks,
        last_row(directory / METRICS),
        read_jsonl(directory / EVENTS)[-_EVENTS_SHOWN:],
        age_s(directory, status) if status else None,
    )


def _steps(config: Mapping[str, Any]) -> int:
    """The steps that the run's verb takes; 0 if unknown."""
    values = flatten(config)
    keys = _STEPS.get(str(config.get("verb")), ("steps",))
    return sum(steps for key in keys if isinstance(steps := values.get(key), int))
