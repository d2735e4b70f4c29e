"""A line on a terminal that shows how long something already takes, from its first second on.

A process of its own draws it: the work may be an import that does not let other threads run, and a process that has
threads cannot fork ranks. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 0.8  # until the first line: what is done by then needs none
TICK_S = 0.2
_FRAMES = "|/-\\"


@contextlib.contextmanager
def shown(text: str, until: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Show `text` with the seconds that the block already takes, if stderr is a terminal. until: ends the line sooner.

    Enter it before threads are started.
    """
    if not _is_terminal():
        yield
        return
    began, parent = time.monotonic(), os.pidfd_open(os.getpid())
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the child's stay blocked
    child = os.fork()
    if not child:
        try:
            _draw(text, until, parent)
        finally:
            os._exit(0)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        os.close(parent)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if time.monotonic() - began > PATIENCE_S and not until():
            _write(" " * (len(_line(text, 0, time.monotonic() - began)) - 1) + "\r")


def _is_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.isatty(sys.stderr.fileno()) and os.environ.get("TERM") != "dumb"
    return False


def _draw(text: str, until: Callable[[], bool], parent: int) -> None:
    """As the child: draw the line until the parent ends. The cursor stays at its beginning: other text replaces it."""
    began, number = time.monotonic(), 0
    wait_s = PATIENCE_S
    while not select.select([parent], [], [], wait_s)[0]:
        wait_s = TICK_S
        if until():
            _write(" " * (len(_line(text, 0, time.monotonic() - began)) - 1) + "\r")
            return
        _write(_line(text, number, time.monotonic() - began))
        number += 1


def _line(text: str, number: int, elapsed_s: float) -> str:
    return f"{_FRAMES[number % len(_FRAMES)]} {text}: {elapsed_s:.0f} s\r"


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())
