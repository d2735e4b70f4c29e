"""Processes of the operating system: signals, exit codes, start times, and kills by the out-of-memory killer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path


def own_group(pid: int) -> None:
    """Give a rank its own process group: Ctrl-C then reaches only the launcher, and `reap` ends its children."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def kill(pid: int, number: int) -> None:
    """Send a signal to a rank that may have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap(pid: int, wait: bool = False) -> int | None:
    """Return the exit code of a rank, or minus the number of the signal that ended it; None if it still runs.

    All processes that it has started are killed before it is reaped, while its pid is reserved.
    """
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)) is None:
        return None
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or a debugger has stopped a process."""
    return _proc_stat(pid)[:1] in (["T"], ["t"])


def start_time(pid: int) -> str:
    """Return when a process was started, unique with its pid; `exited <pid>` if it has exited; "" off Linux."""
    fields = _proc_stat(pid)
    if fields and fields[0] not in "ZX":  # zombies have exited
        return fields[19]
    return f"exited {pid}" if _proc_stat(os.getpid()) else ""


def _proc_stat(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` after the process's name; an empty list if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def oom_kills() -> int:
    """Return how often the kernel has killed a process of our memory cgroup."""
    with contextlib.suppress(OSError), open("/sys/fs/cgroup/memory.events") as file:
        match = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        return int(match.group(1)) if match else 0
    return 0
