"""The points of one sweep in several processes (Hydra's launchers joblib and submitit).

However a process ends, what it has said here ends with it: a lock is the kernel's, and a note without a row is a point
that was lost.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallelrun.base.errors import EXIT_RANK_DIED
from parallelrun.base.records import append_jsonl, write_json
from parallelrun.launch.host import share
from parallelrun.report.sweeps import sweep_rows

FOLDER = ".points"  # of a sweep's directory, while it runs
PATIENCE_S = 20.0  # for points to stop their ranks
_THREADS = "_NUM_THREADS"


@contextmanager
def exclusive(directory: Path, identity: str) -> Iterator[None]:
    """Wait until no other process runs the point of this identity: a repeated point then finds the first one's row."""
    folder = directory / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / identity, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def note(directory: Path, row: Mapping[str, Any]) -> bool:
    """Write down that this process runs a point, until `record` has its row. False if the sweep has been stopped."""
    (directory / FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(_note(directory, row), {**row, "process": os.getpid(), "host": os.uname().nodename})
    is_stopped = _stop_sign(directory, row["invocation"]).exists()
    if is_stopped:
        _note(directory, row).unlink()
    return not is_stopped


def record(directory: Path, row: Mapping[str, Any]) -> None:
    """Append the row of a point that has ended."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_jsonl(directory / sweep_rows.RESULTS, row)
    _note(directory, row).unlink(missing_ok=True)


def close(directory: Path, invocation: int, stopped: int) -> int:
    """Wait for the points of this command that still run, and append a row for each whose process ended without one.

    stopped: the exit code of an interrupted sweep, whose points are told to stop; 0 if it was not. Return the number of
    points without a row of their own.
    """
    if stopped and directory.is_dir():  # of processes that have not begun their point, too
        (directory / FOLDER).mkdir(exist_ok=True, mode=0o700)
        _stop_sign(directory, invocation).touch()
    for path in _notes(directory, invocation):
        _end(sweep_rows.read_json(path), bool(stopped))
    lost = _notes(directory, invocation)
    for path in lost:
        row = {key: value for key, value in sweep_rows.read_json(path).items() if key not in ("process", "host")}
        reason = "the process of this point ended without a result: killed, or out of memory"
        ended = {"state": "failed", "exit_code": EXIT_RANK_DIED, "reason": reason}
        record(directory, {**row, **({"state": "stopped", "exit_code": stopped} if stopped else ended)})
    if not stopped:  # a point that starts late must find the sign
        shutil.rmtree(directory / FOLDER, ignore_errors=True)
    return len(lost)


def _end(row: Mapping[str, Any], stopped: bool) -> None:
    """Wait until the process of a point has ended; if the sweep is `stopped`, tell it to, and do not wait for long."""
    if row.get("host") != os.uname().nodename:
        return
    try:
        descriptor = os.pidfd_open(row["process"])
    except OSError:
        return  # it has ended
    try:
        if stopped:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        select.select([descriptor], [], [], PATIENCE_S if stopped else None)
    finally:
        os.close(descriptor)


def _notes(directory: Path, invocation: int) -> list[Path]:
    return sorted((directory / FOLDER).glob(f"{invocation}-*.json"))


def _stop_sign(directory: Path, invocation: int) -> Path:
    return directory / FOLDER / f"{invocation}-stopped"


def _note(directory: Path, row: Mapping[str, Any]) -> Path:
    return directory / FOLDER / f"{row['invocation']}-{row['point']:06d}.json"


def has_own_host() -> bool:
    """Whether a scheduler has given this process cores and GPUs of its own (submitit under Slurm)."""
    return os.environ.get("SUBMITIT_EXECUTOR") == "slurm"


def share_host(directory: Path, parts: int, threads_given: frozenset[str]) -> None:
    """Give this process its share of cores and GPUs, if the sweep's own process started it.

    threads_given: the thread counts that the user has set. Those that a launcher has set are forgotten: they count
    cores for one process, not for the ranks that a point starts.
    """
    for name in [name for name in os.environ if name.endswith(_THREADS) and name not in threads_given]:
        del os.environ[name]
    if parts > 1:
        share.limit(directory / FOLDER, parts)


def threads_given() -> frozenset[str]:
    """The names of the thread counts in this process's environment."""
    return frozenset(name for name in os.environ if name.endswith(_THREADS))
