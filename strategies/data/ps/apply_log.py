"""`apply_log.jsonl`: every update of every server, in the order in which that server applied it.

A run can be replayed from it in one process, bit for bit (`reference.py`): each row names the worker and step of every
push, and the version of this server's weights with which the gradient was computed. Each server appends its own rows.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.records import append_jsonl

NAME = "apply_log.jsonl"


@dataclass(frozen=True)
class Push:
    """One worker's part in an update. pulled: the version of the weights that it used. loss: mean over its samples.

    num_valid: its weight in the average of several pushes. norm: of its gradient before clipping (async), else 0.
    """

    worker: int
    clock: int
    pulled: int
    loss: float
    num_valid: float
    norm: float = 0.0


@dataclass(frozen=True)
class AppliedUpdate:
    """One update of one server, from version - 1 to `version`, by the mean of `pushes` in that order.

    applied: False for a step that was skipped because a value was not finite. coefficient: of clipping on the server.
    loss, norm: of the update. gap: the clock gap then. time_s: since the server began, evaluation and saving included.
    step_time_s: of the worker.
    """

    server: int
    version: int
    clock: int
    pushes: tuple[Push, ...]
    lr: float
    loss: float
    norm: float
    applied: bool = True
    coefficient: float = 1.0
    gap: int = 0
    time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each push, the number of updates between the weights that it used and this update."""
        return tuple(self.version - 1 - push.pulled for push in self.pushes)


@dataclass(frozen=True)
class DroppedPush:
    """A push that came too late: the server had already made `version` without it."""

    server: int
    worker: int
    clock: int
    pulled: int
    version: int
    time_s: float = 0.0


LogRow = AppliedUpdate | DroppedPush


def append_row(directory: Path, row: LogRow) -> None:
    """Append a row. Raises OSError for a full disk: a log with a missing row could not be replayed."""
    derived: dict[str, Any] = {"staleness": row.staleness} if isinstance(row, AppliedUpdate) else {}
    kind = "update" if isinstance(row, AppliedUpdate) else "dropped"
    append_jsonl(directory / NAME, {"kind": kind, **asdict(row), **derived})


class ApplyLogReader:
    """Reads a growing log."""

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._offset = 0

    def new_rows(self) -> list[LogRow]:
        """Return the rows appended since the last call. An unfinished line is left for the next call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [_row(json.loads(line)) for line in complete.splitlines()]


def read_log(directory: Path) -> list[LogRow]:
    """Return the complete log of a run."""
    return ApplyLogReader(directory).new_rows()


def _row(fields: dict[str, Any]) -> LogRow:
    kind = DroppedPush if fields["kind"] == "dropped" else AppliedUpdate
    values = _numbers({name: fields[name] for name in kind.__dataclass_fields__})
    if kind is AppliedUpdate:
        values["pushes"] = tuple(Push(**_numbers(push)) for push in values["pushes"])
    return kind(**values)


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn null, as which JSON stores a non-finite number, into nan."""
    return {name: float("nan") if value is None else value for name, value in fields.items()}


class LogStatistics:
    """Staleness, clock gap and dropped pushes, from one server's rows of the apply log."""

    def __init__(self) -> None:
        self._updates: Counter[bool] = Counter()  # by whether they were applied
        self._staleness: dict[int, Counter[int]] = defaultdict(Counter)  # by worker
        self._dropped: Counter[int] = Counter()  # by worker
        self._gap = 0

    def add(self, row: LogRow) -> None:
        if isinstance(row, DroppedPush):
            self._dropped[row.worker] += 1
            return
        self._updates[row.applied] += 1
        for push, staleness in zip(row.pushes, row.staleness):
            self._staleness[push.worker][staleness] += 1
        self._gap = max(self._gap, row.gap)

    def document(self) -> dict[str, Any]:
        """Return the fields of servers.json."""
        staleness = sum(self._staleness.values(), Counter[int]())
        num_pushes = staleness.total()
        return {
            "updates": self._updates[True],
            "skipped_updates": self._updates[False],
            "staleness_mean": sum(s * count for s, count in staleness.items()) / num_pushes if num_pushes else None,
            "staleness_max": max(staleness, default=None),
            "staleness_of_worker": {worker: dict(sorted(c.items())) for worker, c in sorted(self._staleness.items())},
            "clock_gap_max": self._gap,
            "dropped_gradients": self._dropped.total(),
            "dropped_of_worker": dict(sorted(self._dropped.items())),
        }
