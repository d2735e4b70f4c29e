"""`runs gc`: what may be deleted below `runs`, and deleting it. Runs that train are never touched."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from parallelrun.base.errors import ParallelrunError
from parallelrun.base.wording import counted
from parallelrun.checkpoint.find import FOLDER, complete_steps, keep_last
from parallelrun.report.records import find
from parallelrun.report.records.find import CONFIG, LATEST, MANIFEST, STATUS
from parallelrun.report.records.read import read_object, read_yaml
from parallelrun.report.records.rows import BROKEN, DIED, EMPTY, RunRow, read_row
from parallelrun.report.sweeps import sweep_picture as comparison
from parallelrun.report.sweeps.sweep_rows import RESULTS, forget
from parallelrun.report.sweeps.sweep_table import CSV, write_csv

QUIET_S = 600.0  # a run that seems to have died must not have written its status for so long
FAILED = ("failed", "interrupted", DIED, BROKEN)


@dataclass(frozen=True)
class Removable:
    """A run directory, or the checkpoints in one beyond the newest `keep` (0: all of the run).

    num_bytes: the size of what would be removed.
    """

    run: Path
    reason: str
    num_bytes: int
    keep: int = 0


@dataclass(frozen=True)
class Policy:
    """Runs and checkpoints to remove. failed: runs that failed without a checkpoint; older_than_s: all runs that ended
    so long ago (None: none); keep: checkpoints of every other run (None: as its own configuration says)."""

    failed: bool = True
    older_than_s: float | None = None
    keep: int | None = None


def removable(runs: Path, policy: Policy) -> list[Removable]:
    """Return what the policy would remove below `runs`, the newest run first. Deletes nothing."""
    rows = [read_row(directory) for directory in find.all_runs(runs)]
    needed = _needed(row for row in rows if row.is_live)
    idle = [row for row in rows if not row.is_live and Path(os.path.realpath(row.directory)) not in needed]
    return [candidate for row in idle if (candidate := _of_run(row, policy)) is not None]


def remove(runs: Path, candidates: Iterable[Removable]) -> Iterator[Removable]:
    """Delete, and yield what was deleted with its bytes. A run that has begun to train meanwhile is left alone.

    A directory gets a hidden name before its files are deleted, so that a visible one is always complete. Removed
    points are also removed from their sweep's results; the results are deleted with the last point. Raises OSError.
    """
    removed: dict[Path, list[str]] = {}  # by folder: names of its runs
    try:
        for candidate in candidates:
            if read_row(candidate.run).is_live:
                continue
            if candidate.keep:
                checkpoints = candidate.run / FOLDER
                before = size_of(checkpoints)
                keep_last(checkpoints, candidate.keep, rank=0)
                yield replace(candidate, num_bytes=before - size_of(checkpoints))
                continue
            aside = candidate.run.with_name(f".{candidate.run.name}.gone-{secrets.token_hex(4)}")
            os.rename(candidate.run, aside)
            removed.setdefault(candidate.run.parent, []).append(candidate.run.name)
            shutil.rmtree(aside)
            yield candidate
    finally:
        for group, names in removed.items():
            if (group / RESULTS).is_file():
                _forget_points(group, names)
            with suppress(OSError):
                os.rmdir(group)  # if it was the last one
    latest = runs / LATEST
    if latest.is_symlink() and not latest.exists():
        latest.unlink()


def _forget_points(sweep: Path, names: list[str]) -> None:
    if find.points(sweep):
        forget(sweep, names)
        write_csv(sweep)
        return
    for name in (RESULTS, CSV, comparison.NUMBERS, comparison.PICTURE):
        (sweep / name).unlink(missing_ok=True)


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _of_run(row: RunRow, policy: Policy) -> Removable | None:
    run, now = row.directory, time.time()
    ended = max((path.stat().st_mtime for name in (STATUS, CONFIG) if (path := run / name).exists()), default=now)
    quiet = now - ended
    if row.state == EMPTY or (row.state == DIED and quiet < QUIET_S):
        return None
    if policy.older_than_s is not None and quiet > policy.older_than_s:
        return Removable(run, f"ended {quiet / 86400:.0f} days ago", size_of(run))
    steps = complete_steps(run)
    if policy.failed and row.state in FAILED and not steps:
        return Removable(run, f"{row.state}, nothing to resume from", size_of(run))
    if len(steps) < 2:  # which saves reading the configuration
        return None
    keep = policy.keep if policy.keep is not None else _own_keep(run)
    if keep < 1 or len(steps) <= keep:
        return None
    extra = list(steps.values())[:-keep]
    reason = f"{counted(len(extra), 'checkpoint')} beyond the newest {keep}"
    return Removable(run, reason, sum(map(size_of, extra)), keep)


def _own_keep(run: Path) -> int:
    """`checkpoint.keep` of a run's configuration; 0 (all) if it has none."""
    try:
        section = read_yaml(run / CONFIG).get("checkpoint")
    except ParallelrunError:
        return 0
    keep = section.get("keep") if isinstance(section, dict) else None
    return keep if isinstance(keep, int) else 0


def _needed(live: Iterable[RunRow]) -> set[Path]:
    """The run directories whose checkpoints a live run resumes from."""
    needed: set[Path] = set()
    for row in live:
        with suppress(ParallelrunError):
            resumed = read_object(row.directory / MANIFEST).get("resumed")
            checkpoints = [
                read_yaml(row.directory / CONFIG).get("resume"),
                resumed.get("checkpoint") if isinstance(resumed, dict) else None,
            ]
            for checkpoint in checkpoints:
                if isinstance(checkpoint, str):
                    path = Path(os.path.realpath(checkpoint))
                    needed |= {path, *path.parents}
    return needed
