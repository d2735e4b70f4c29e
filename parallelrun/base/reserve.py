"""Disk space that a run reserves for its last records, so that a full disk cannot hide how it ended."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RECORDS, ERRORS, STATUS = ".reserve-records", ".reserve-errors", ".reserve-status"  # one file for each writer
_BYTES = {RECORDS: 2**18, ERRORS: 2**16, STATUS: 2**14}

T = TypeVar("T")


def set_aside(directory: Path) -> bool:
    """Reserve space in a run directory. Return False if the disk does not have it."""
    try:
        for name, num_bytes in _BYTES.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)
    except OSError:
        release(directory)
        return False
    return True


def release(directory: Path, *names: str) -> None:
    """Free the reserved space of `names`; without names, all of it."""
    for name in names or _BYTES:
        with contextlib.suppress(OSError):
            os.unlink(directory / name)


def insist(directory: Path, name: str, write: Callable[[], T]) -> T:
    """Return `write()`. If the disk is full, free the space reserved under `name` and try once more."""
    try:
        return write()
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        release(directory, name)
        return write()
