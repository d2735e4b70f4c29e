"""One row per run directory for tables and cleaning up: state, step, results. Reads two small files."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ParallelrunError
from parallelrun.report.records.find import CONFIG, STATUS
from parallelrun.report.records.read import METRICS, RESULTS, flatten, read_object, read_yaml

RUNNING, DIED, SILENT, BROKEN, STARTING, EMPTY = "running", "died", "silent", "broken", "starting", "no run"
STYLES = {  # of the states on screen
    **dict.fromkeys(("failed", DIED, SILENT, BROKEN), "red"),
    **dict.fromkeys(("preempted", "interrupted"), "yellow"),
    RUNNING: "green",
}
STATES = ("done", "failed", "preempted", "interrupted", RUNNING, DIED, SILENT, BROKEN, STARTING)
YOUNG_S = 3600.0  # a directory without status.json is that of a run that is about to start
RECENT_S = 60.0  # since status.json was written, within which a process on another host counts as alive
SLACK_S = 120.0  # beyond timeout_s: for ranks that start, and for the clocks of other hosts
_TIMEOUT_S = 300.0  # the default of timeout_s
_TAIL = 8192  # bytes of metrics.jsonl, in which its last row is


@dataclass(frozen=True)
class RunRow:
    """state: of status.json, or died (it says running, but the process is gone), broken (unreadable), starting.

    results: the values of the summary, or the last row of metrics.jsonl. error: why it failed or is broken.
    """

    directory: Path
    state: str
    step: int
    error: str
    results: dict[str, Any]

    @property
    def name(self) -> str:
        """`gpt-ptdp-tp2pp2`, or `sweep-<time>-<random>` of a point."""
        return self.directory.parent.name

    @property
    def id(self) -> str:
        """By which `find.resolve` knows the run: the random end of its directory's name, of a point `<end>/<name>`."""
        end = self.name.rpartition("-")[2]
        return f"{end}/{self.directory.name}" if self.is_point else self.directory.name.rpartition("-")[2]

    @property
    def is_point(self) -> bool:
        return self.name.startswith("sweep-")


def read_row(directory: Path) -> RunRow:
    """Return the row of a directory. A broken file is the row's state, so that one bad run does not hide all others."""
    try:
        status = read_object(directory / STATUS)
        results = next((flatten(values) for name in RESULTS if (values := read_object(directory / name))), {})
    except ParallelrunError as error:
        return RunRow(directory, BROKEN, 0, error.problems[0].what, {})
    if not status:
        return RunRow(directory, _without_status(directory), 0, "", results)
    step = status.get("step")
    state, message = str(status.get("state", BROKEN)), str(status.get("error") or "")
    if state == RUNNING and _is_gone(status):
        state = DIED
    elif state == RUNNING and (quiet_s := age_s(directory, status)) > SLACK_S + _timeout_s(directory):
        state = SILENT
        message = f"no news for {quiet_s:,.0f} s: all of it was killed at once, its hosts are lost, or it is stopped"
    if not results:
        results = last_row(directory / METRICS)
        step = results.get("step", step)
    return RunRow(directory, state, step if isinstance(step, int) else 0, message, results)


def writer_of(directory: Path) -> str:
    """Return which process on which host still trains the run in a directory; empty if it seems to have ended.

    Of a process on another host only its news are known: status.json is written every few seconds.
    """
    if read_row(directory).state != RUNNING:
        return ""
    status = read_object(directory / STATUS)
    pid, host = status.get("pid"), status.get("host")
    if host != socket.gethostname() and age_s(directory, status) > RECENT_S:
        return ""
    return f"process {pid} on {host}"


def last_row(path: Path) -> dict[str, Any]:
    """Return the last complete row of metrics.jsonl without reading the others; {} if it has none."""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):
                row = json.loads(line)
                return row if isinstance(row, dict) else {}
    return {}


def age_s(directory: Path, status: Mapping[str, Any]) -> float:
    """Return the seconds since status.json was written, by its own time or its file's, whichever is later."""
    written = 0.0
    with suppress(OSError):
        written = (directory / STATUS).stat().st_mtime
    with suppress(ValueError):
        written = max(
            written, datetime.fromisoformat(str(status.get("updated_utc")).replace("Z", "+00:00")).timestamp()
        )
    return max(0.0, time.time() - written)


def _timeout_s(directory: Path) -> float:
    with suppress(ParallelrunError):
        timeout_s = read_yaml(directory / CONFIG).get("timeout_s")
        return float(timeout_s) if isinstance(timeout_s, (int, float)) else _TIMEOUT_S
    return _TIMEOUT_S


def _without_status(directory: Path) -> str:
    try:
        age = time.time() - directory.stat().st_mtime
    except OSError:
        return EMPTY
    if age < YOUNG_S:
        return STARTING
    return BROKEN if (directory / CONFIG).exists() else EMPTY


def _is_gone(status: dict[str, Any]) -> bool:
    """Return whether the process of a run on this host has ended. Of a run on another host nothing is known."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user
        return False
    return False
