"""Where a rank is that makes no progress: asleep, computing or waiting for others, and in which lines.

A thread of each rank writes the position of the rank's main thread to a file. The launcher asks for it by SIGUSR1. On
this signal faulthandler also writes all stacks to the log, even if native code never releases Python's lock.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

from parallelrun.base import user_code
from parallelrun.base.context import PendingCollective
from parallelrun.base.records import typed, write_json

SLEEPS, COMPUTES, WAITS = "sleeps", "computes", "waits for other ranks"
ASK = signal.SIGUSR1  # faulthandler writes all stacks on it, too
STOPPED = "is stopped (SIGSTOP), so that no stack can be had"
LOCKED = "holds Python's lock in native code"
SILENT = "does not answer"
_FRAME = re.compile(r'(?m)^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_WAITING_CALL = re.compile(
    r"\.(wait|synchronize|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|recv|send)\("
)
_DEPTH = 4  # innermost frames in which a waiting call counts
_APART_S, _MOST_LOOKS = 0.2, 5  # looks at a thread: one that computes may wait for a core that others use
_BUSY_S = 0.004  # of processor time between them, of a rank that computes


@dataclass(frozen=True)
class Position:
    """A rank's activity (one of the texts above), the collective that it waits for, the number of collectives that it
    has issued by group, and its frames in the user's code and in ours, innermost first.

    in_collective: its innermost frames are of torch.distributed or call something that waits, so that it may wait for
    other ranks even if it is not known for what.
    """

    activity: str
    frames: tuple[str, ...] = ()
    waits_for: PendingCollective | None = None
    issued: dict[str, int] = field(default_factory=dict)
    in_collective: bool = False

    @property
    def text(self) -> str:
        """The activity and the innermost function: `sleeps in forward (net.py:7)`."""
        return f"{self.activity} in {function_of(self.frames[0])}" if self.frames else self.activity


def own_position() -> Position:
    """Return what the main thread of this process does. Called in another thread; it takes a moment."""
    main = threading.main_thread().ident
    assert main is not None
    before = _cpu_s(main)
    for _ in range(_MOST_LOOKS):
        time.sleep(_APART_S)
        frame, used_s = sys._current_frames().get(main), _cpu_s(main) - before
        waits_for, issued = _communication(frame)
        if waits_for is not None or used_s > _BUSY_S:
            break
    stack = list(_frames(frame))
    activity = WAITS if waits_for is not None else COMPUTES if used_s >= _BUSY_S else SLEEPS
    in_collective = waits_for is not None or _waits(stack)
    return Position(activity, user_code.of_stack(stack), waits_for, issued, in_collective)


def _waits(stack: Sequence[tuple[str, int, str]]) -> bool:
    """Return whether the innermost frames of a stack (file, line, function) are those of a collective."""
    return any(
        "torch/distributed" in file or _WAITING_CALL.search(linecache.getline(file, line)) is not None
        for file, line, _ in stack[:_DEPTH]
    )


def _communication(frame: FrameType | None) -> tuple[PendingCollective | None, dict[str, int]]:
    """Return what the process waits for, and how many collectives it has issued, by group."""
    if "torch.distributed" not in sys.modules:
        return None, {}
    from parallelrun.distributed.comm import waiting

    return waiting.current_wait(frame), waiting.num_issued()


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
    stack = [(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(main_thread)]
    return Position(LOCKED, user_code.of_stack(stack), in_collective=_waits(stack)) if stack else Position(SILENT)


def function_of(frame: str) -> str:
    """Return `misbehave (workers.py:61)` of `tests/cli/workers.py:61 in misbehave: time.sleep(1000)`."""
    place, _, rest = frame.partition(" in ")
    name = rest.partition(":")[0]
    return f"{name} ({place})" if name else place


# -- asked by the launcher


def path_of(directory: Path, rank: int) -> Path:
    """Return the file to which a rank writes its position on ASK."""
    return directory / "logs" / f"position_rank_{rank}.json"


def read_position(directory: Path, rank: int) -> Position | None:
    """Return the position that a rank has written; None if it has written none."""
    try:
        written: Position = typed(Position, json.loads(path_of(directory, rank).read_text()))
        return written
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tell_when_asked(directory: Path, rank: int) -> None:
    """Let this rank write its position when ASK arrives. Called once, in its main thread, before faulthandler registers
    the same signal with `chain`.

    Python writes a signal's number to a pipe at once, even if the main thread is blocked. A thread reads the pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(ASK, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def answer() -> None:
        while numbers := os.read(reader, 64):
            if ASK in numbers:
                with contextlib.suppress(Exception):  # the launcher then has the stacks alone
                    write_json(path_of(directory, rank), asdict(own_position()))

    threading.Thread(target=answer, daemon=True, name="parallelrun-position").start()
