"""Where a rank is that makes no progress: asleep, computing or waiting for others, and in which lines. Torch-free.

A rank tells its own position, from a thread beside the one that trains. The launcher asks for it by SIGUSR1, on which
faulthandler also writes all stacks to the log: that succeeds even if native code never gives back Python's lock.
"""

from __future__ import annotations

import contextlib
import dis
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from parallelrun.base import user_code
from parallelrun.base.context import PendingCollective
from parallelrun.base.records import write_json

SLEEPS, SPINS, COMPUTES = "sleeps", "spins in Python", "computes in native code"
WAITS = "waits for other ranks"
ASK = signal.SIGUSR1  # faulthandler writes all stacks on it, too
STOPPED = "is stopped (SIGSTOP), so that no stack can be had"
LOCKED = "holds Python's lock in native code"
SILENT = "does not answer"
_FRAME = re.compile(r'(?m)^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_APART_S, _MOST_LOOKS = 0.2, 5  # looks at a thread: one that computes may wait for a core that others use
_SOON_S = 0.02  # between looks at one that computes
_BUSY_S = 0.004  # of processor time between them, of a rank that computes


@dataclass(frozen=True)
class Position:
    """A rank's activity (one of the texts above), the collective that it waits for, the number of collectives that it
    has issued by group, and its frames in the user's code and in ours, innermost first."""

    activity: str
    frames: tuple[str, ...] = ()
    waits_for: PendingCollective | None = None
    issued: dict[str, int] = field(default_factory=dict)


def from_json(fields: dict[str, Any] | None) -> Position | None:
    """Return the Position whose fields were written as JSON; None for None."""
    if fields is None:
        return None
    wait = fields["waits_for"]
    if wait is not None:
        missing = None if wait["missing"] is None else tuple(wait["missing"])
        wait = PendingCollective(**{**wait, "ranks": tuple(wait["ranks"]), "missing": missing})
    return Position(fields["activity"], tuple(fields["frames"]), wait, fields["issued"])


def own_position() -> Position:
    """Return what the main thread of this process does. Called in another thread; it takes a moment."""
    main = threading.main_thread().ident
    assert main is not None
    first, before = _instruction(main), _cpu_s(main)
    for _ in range(_MOST_LOOKS):
        time.sleep(_APART_S)
        frame, used_s = sys._current_frames().get(main), _cpu_s(main) - before
        waits_for, issued = _communication(frame)
        if waits_for is not None or used_s > _BUSY_S:
            break
    stack = user_code.of_stack(_frames(frame))
    if waits_for is not None:
        return Position(WAITS, stack, waits_for, issued)
    if used_s < _BUSY_S:
        return Position(SLEEPS, stack, None, issued)
    in_call = frame is not None and _is_call(frame) and _stays(main, first)
    return Position(COMPUTES if in_call else SPINS, stack, None, issued)


def _communication(frame: FrameType | None) -> tuple[PendingCollective | None, dict[str, int]]:
    """Return what the process waits for, and how many collectives it has issued, by group."""
    if "torch.distributed" not in sys.modules:
        return None, {}
    from parallelrun.distributed.comm import waiting

    return waiting.current_wait(frame), waiting.num_issued()


def _instruction(thread: int) -> tuple[int, int] | None:
    frame = sys._current_frames().get(thread)
    return (id(frame.f_code), frame.f_lasti) if frame is not None else None


def _stays(thread: int, instruction: tuple[int, int] | None) -> bool:
    """Return whether a thread stands at this instruction at several looks: a loop may come back to it for one."""
    for _ in range(_MOST_LOOKS):
        if _instruction(thread) != instruction:
            return False
        time.sleep(_SOON_S)
    return True


def _is_call(frame: FrameType) -> bool:
    """Return whether a frame stands at a call: of native code, if it is the innermost one."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")


def _cpu_s(thread: int) -> float:
    """Return the processor time of a thread, where the system tells it."""
    with contextlib.suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return 0.0


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def of_dump(dump: str) -> Position:
    """Return the position of a rank that cannot tell it, from faulthandler's dump of its process."""
    main_thread = re.split(r"(?m)^(?:Current thread|Thread) .*$", dump)[-1]
    found = [(one["file"], int(one["line"]), one["function"]) for one in _FRAME.finditer(main_thread)]
    return Position(LOCKED, user_code.of_stack(found)) if found else Position(SILENT)


# -- asked by the launcher


def path_of(directory: Path, rank: int) -> Path:
    """Return the file in which a rank tells its position when it is asked."""
    return directory / "logs" / f"position_rank_{rank}.json"


def read(directory: Path, rank: int) -> Position | None:
    """Return the position that a rank has told; None if it has told none."""
    try:
        return from_json(json.loads(path_of(directory, rank).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tell_when_asked(directory: Path, rank: int) -> None:
    """Let this rank tell its position when ASK comes. Called once, in its main thread, before faulthandler registers
    the same signal with `chain`.

    Python notes a signal in a pipe at once, whatever the main thread does, and a thread waits at the pipe's other end.
    """
    told, noted = os.pipe()
    os.set_blocking(noted, False)
    signal.signal(ASK, lambda *_: None)
    signal.set_wakeup_fd(noted, warn_on_full_buffer=False)

    def answer() -> None:
        while numbers := os.read(told, 64):
            if ASK in numbers:
                with contextlib.suppress(Exception):  # the launcher then has the stacks alone
                    write_json(path_of(directory, rank), asdict(own_position()))

    threading.Thread(target=answer, daemon=True, name="parallelrun-position").start()
