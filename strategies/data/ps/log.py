"""`apply_log.jsonl`: every update of every server, in the order in which that server made it. Torch-free.

With it a run can be computed again in one process bit for bit (`rerun.py`): of each push it says whose it was, of which
step, and with which version of this server's weights its gradient had been computed. Each server appends its own rows.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parallelrun.records import append_jsonl

NAME = "apply_log.jsonl"


@dataclass(frozen=True)
class Push:
    """One worker's part in an update. pulled: the version that it had computed with; loss: mean over its samples.

    num_valid: its weight where several pushes are averaged. norm: of its gradient before clipping (async), else 0.
    """

    worker: int
    clock: int
    pulled: int
    loss: float
    num_valid: float
    norm: float = 0.0


@dataclass(frozen=True)
class Applied:
    """One update of one server: from version - 1 to `version`, by the mean of `pushes` (in that order).

    applied: False for a step that was skipped because something was not finite. coefficient: of clipping on the server.
    loss, norm: of the update. queue: other requests that the server held when the update's last push came. gap: the
    clock gap then. time_s: since the servers began, evaluation and saving included. step_time_s: of the worker.
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
    queue: int = 0
    gap: int = 0
    time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def staleness(self) -> tuple[int, ...]:
        """Updates that came between what each push was computed with and this one."""
        return tuple(self.version - 1 - push.pulled for push in self.pushes)


@dataclass(frozen=True)
class Dropped:
    """A push that came too late: `version` had been made without it."""

    server: int
    worker: int
    clock: int
    pulled: int
    version: int
    time_s: float = 0.0


@dataclass
class ServerLog:
    """Writes one server's rows."""

    directory: Path | None
    rows: list[Applied | Dropped] = field(default_factory=list)

    def add(self, row: Applied | Dropped) -> None:
        """Append a row. Raises OSError for a full disk: a run whose log has a hole could not be told again."""
        if self.directory is None:
            self.rows.append(row)
            return
        kind = {"kind": "update"} if isinstance(row, Applied) else {"kind": "dropped"}
        more: dict[str, Any] = {"staleness": row.staleness} if isinstance(row, Applied) else {}
        append_jsonl(self.directory / NAME, {**kind, **asdict(row), **more})


class LogReader:
    """Reads a log that grows; `new` gives what has come since."""

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._offset = 0

    def new(self) -> list[Applied | Dropped]:
        """The rows appended since the last call. A line that is not finished waits for the next."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_row(json.loads(line)) for line in whole.splitlines()]


def read(directory: Path) -> list[Applied | Dropped]:
    """The whole log of a run."""
    return LogReader(directory).new()


def _row(fields: dict[str, Any]) -> Applied | Dropped:
    kind = Dropped if fields["kind"] == "dropped" else Applied
    values = {name: fields[name] for name in kind.__dataclass_fields__}
    if kind is Applied:
        values["pushes"] = tuple(Push(**_numbers(push)) for push in values["pushes"])
    return kind(**_numbers(values))


def _numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """What was not finite is null in JSON."""
    return {name: float("nan") if value is None else value for name, value in fields.items()}
