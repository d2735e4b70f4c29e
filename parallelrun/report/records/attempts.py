"""The attempts of a run that was restarted: `attempts.json`, and what each attempt left in `attempts/<n>/`.

A restarted run keeps its directory. `metrics.jsonl` then has every step once: rows after the checkpoint from which the
next attempt resumed are moved to the directory of the attempt that wrote them.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from parallelrun.base.records import write_json, write_text
from parallelrun.report.records.find import CONFIG

FILE, FOLDER = "attempts.json", "attempts"
_ROWS = ("metrics.jsonl", "routing.jsonl", "apply_log.jsonl")
_FAILURES = "errors"
# in logs/: the first collectives of ranks that have not passed two steps, and where ranks were in a hang
_OF_ATTEMPT = ("collectives_rank_*.txt", "position_rank_*.json")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run. Times are seconds since the epoch; those of the future are None.

    number: from 1; resumed_step: of the checkpoint from which it resumed, 0 for a fresh start; stepping: when its first
    step began; step: the last step that it completed; saved: the last step that was saved when it ended; exit_code,
    error, rank, host: how it ended, `rank` the one that failed first; raised: by an exception of its worker; memory: by
    a lack of it; repeated_s: time of its steps that the next attempt takes again.
    """

    number: int
    world: int
    degrees: Mapping[str, int]
    began: float = field(default_factory=time.time)
    resumed_step: int = 0
    checkpoint: str | None = None
    stepping: float | None = None
    ended: float | None = None
    step: int = 0
    saved: int = 0
    exit_code: int | None = None
    error: str = ""
    rank: int | None = None
    host: str = ""
    raised: bool = False
    memory: bool = False
    repeated_s: float = 0.0


def folder_of(directory: Path, number: int) -> Path:
    """Return where an attempt's own files are: the run directory for the first one."""
    return directory if number == 1 else directory / FOLDER / str(number)


def config_file(directory: Path, number: int) -> Path:
    """Return the frozen configuration from which the ranks of an attempt start."""
    return folder_of(directory, number) / CONFIG


def read(directory: Path) -> list[Attempt]:
    """Return the attempts of a run; none if it may not restart, or the file is broken."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return [Attempt(**row) for row in json.loads((directory / FILE).read_text())["attempts"]]
    return []


def write(directory: Path, attempts: Sequence[Attempt]) -> None:
    """Write the attempts of a run. A full disk must not end it because of this."""
    with contextlib.suppress(OSError):
        write_json(directory / FILE, {"attempts": [asdict(attempt) for attempt in attempts]})


def first_step_begins(directory: Path) -> None:
    """Record, as rank 0, that the present attempt takes its first step. Without attempts nothing is recorded."""
    attempts = read(directory)
    if attempts and attempts[-1].stepping is None:
        write(directory, [*attempts[:-1], replace(attempts[-1], stepping=time.time())])


def lost_s(attempts: Sequence[Attempt]) -> float:
    """Return the seconds that failures cost: from each failure to the next step, and the work that was repeated."""
    down = [
        after.stepping - before.ended
        for before, after in pairwise(attempts)
        if before.ended is not None and after.stepping is not None
    ]
    return sum(down) + sum(attempt.repeated_s for attempt in attempts[:-1])


def repeated_steps(attempts: Sequence[Attempt]) -> int:
    """Return how many steps were taken again."""
    return sum(max(0, before.step - after.resumed_step) for before, after in pairwise(attempts))


def summary(directory: Path) -> dict[str, Any]:
    """Return the fields of summary.json about restarts; empty for a run that had none."""
    attempts = read(directory)
    if len(attempts) < 2:
        return {}
    return {
        "restarts": len(attempts) - 1,
        "restart_lost_s": lost_s(attempts),
        "repeated_steps": repeated_steps(attempts),
    }


def status(directory: Path) -> dict[str, Any]:
    """Return the fields of status.json about attempts; empty for a run that may not restart."""
    attempts = read(directory)
    if not attempts:
        return {}
    before = attempts[-2] if len(attempts) > 1 else None
    last = {key: getattr(before, key) for key in ("step", "exit_code", "error", "rank", "host")} if before else None
    return {"attempt": attempts[-1].number, "last_failure": last}


def lines(attempts: Sequence[Attempt], most: int | None = None, step: int = 0) -> list[str]:
    """Return a line for each attempt: its ranks, its steps, and why it ended. most: attempts that are allowed; step:
    the run's last one, to which an attempt has come that has not failed."""
    out = []
    for attempt in attempts:
        of = f" of {most}" if most else ""
        degrees = " ".join(f"{axis}={size}" for axis, size in attempt.degrees.items() if size > 1)
        shown = f"attempt {attempt.number}{of}: {attempt.world} ranks{f' ({degrees})' if degrees else ''}"
        last = attempt.step if attempt.ended is not None else max(attempt.step, step)
        shown += f", steps {attempt.resumed_step + 1} to {last}" if last > attempt.resumed_step else ", no step"
        if attempt.error:
            host = f" on {attempt.host}" if attempt.host else ""
            who = f"rank {attempt.rank}{host} " if attempt.rank is not None else ""
            shown += f", ended by {who}({attempt.error})"
        out.append(shown)
    return out


def rewind(directory: Path, step: int, number: int) -> float:
    """Remove what came after `step` from the run's rows; return the seconds that its steps took.

    The removed rows, the failures, the unfinished sequences of collectives and the positions of ranks go to
    `attempts/<number>/`, the attempt that wrote them. No rank may be alive. A reader sees the old file or the complete
    new one. Raises OSError.
    """
    aside = directory / FOLDER / str(number)
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    removed_s = 0.0
    for name in _ROWS:
        removed_s += _split(directory / name, step, aside / name)
    logs = [path for pattern in _OF_ATTEMPT for path in (directory / "logs").glob(pattern)]
    for path in [directory / _FAILURES, *logs]:
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, aside / path.name)
    return removed_s


def _split(path: Path, step: int, aside: Path) -> float:
    """Move the rows after `step` to the file `aside`; return the sum of their times.

    Rows that are no steps of all ranks go, too: updates of a parameter server, of which each attempt has its own
    numbers, and a line that a full disk has torn.
    """
    remaining: list[str] = []
    removed: list[str] = []
    seconds = 0.0
    try:
        with open(path) as file:
            for line in file:
                row = _row(line)
                if row is not None and row["step"] <= step:
                    remaining.append(line)
                else:
                    removed.append(line)
                    seconds += (row or {}).get("step_time_s") or 0.0
    except FileNotFoundError:
        return seconds
    if removed:
        write_text(aside, "".join(removed))
        write_text(path, "".join(remaining))
    return seconds


def _row(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "clock" not in row:
            return row
    return None
