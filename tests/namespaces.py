"""Tests in network namespaces, only where this process may create them; the processes of a namespace."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from parallelrun.launch.host import emulation

needs_namespaces = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "can create namespaces")


def processes_beside(pid: int) -> list[int]:
    """All processes that have the host name of process `pid`, which has a namespace of its own."""
    own = os.readlink(f"/proc/{pid}/ns/uts")
    pids = []
    for path in Path("/proc").glob("[0-9]*/ns/uts"):
        with contextlib.suppress(OSError):
            if os.readlink(path) == own:
                pids.append(int(path.parts[2]))
    return pids
