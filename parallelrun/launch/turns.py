"""How ranks that share cores take turns on Linux: without interrupting each other, because that empties caches.

By itself the kernel (EEVDF, Linux 6.12 and later) lets another process run after about 3 milliseconds. That is less
than many ranks compute between two waits. Ranks ask for longer turns, which they mostly end themselves by waiting;
processes that ask for nothing still run as soon as they would beside any other process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

TURN_NS = 20_000_000
_SYSCALLS = {"x86_64": 314, "aarch64": 274}  # of sched_setattr(2), which the C library has had since glibc 2.41


class _Attributes(ctypes.Structure):
    """The first version of the kernel's struct sched_attr. runtime: of SCHED_BATCH, the length of a turn."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def take_long_turns() -> None:
    """Let this process interrupt no other when it is woken, and run longer once it does; threads and forks inherit it.

    Older kernels know the first only. Nothing changes where the system refuses, or is not Linux.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        number = _SYSCALLS.get(os.uname().machine)
        if number is not None:
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_BATCH, 0, nice, 0, TURN_NS)
            ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0)
