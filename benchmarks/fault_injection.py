"""The real training with planted faults: a worker for `Job.worker`, which reads the faults from PARALLELRUN_FAULTS.

A fault happens on one rank in one attempt, at a heartbeat or a while after it, so that a run can have several of them.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from parallelrun.base.context import WorkerContext
from parallelrun.checkpoint import files, storage
from parallelrun.checkpoint.find import complete_steps
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.ranks import worker
from parallelrun.planner.contract.plan import Plan
from parallelrun.report.records import attempts

VARIABLE = "PARALLELRUN_FAULTS"
WORKER = f"{__name__}:run"
IN_TURN = 0
SLOW_STEPS, SLOW_S = 5, 0.05
SLOW, LATE = "slow rank", "late kill"
SAVES = ("full disk",)  # faults that happen in a save; `late kill` happens after the last; all others in a step


@dataclass(frozen=True)
class Fault:
    """kind: a key of FAULTS. It happens on `rank` in `attempt`, `delay_s` after the beginning of `step`.

    In the attempt IN_TURN it happens in any attempt, but after the faults that are planted before it.
    """

    kind: str
    rank: int
    step: int
    attempt: int = 1
    delay_s: float = 0.0


def variable(faults: Iterable[Fault]) -> dict[str, str]:
    """Return the environment variable that asks for these faults."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def run(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Run the real worker; at each heartbeat, let the faults of this rank happen whose time has come."""
    attempt = max((one.number for one in attempts.read(context.directory)), default=1)
    planted = [Fault(**fields) for fields in json.loads(os.environ.get(VARIABLE, "[]"))]
    waiting = {
        number: one
        for number, one in enumerate(planted)
        if one.rank == context.rank and one.attempt in (attempt, IN_TURN) and not _marker(context, number).exists()
    }

    def is_due(number: int, fault: Fault, step: int, phase: str) -> bool:
        where = ("save",) if fault.kind in SAVES else ("step", "serve")
        if fault.kind == LATE or phase not in where or step < fault.step:
            return False
        return not (fault.attempt == IN_TURN and number) or _marker(context, number - 1).exists()

    def heartbeat(step: int, phase: str) -> None:
        context.heartbeat(step, phase)
        for number, fault in list(waiting.items()):
            if not is_due(number, fault, step, phase):
                continue
            if fault.kind != SLOW or step >= fault.step + SLOW_STEPS:
                del waiting[number]
            _marker(context, number).touch()
            act = partial(FAULTS[fault.kind], context.directory)
            later(fault.delay_s, act) if fault.delay_s else act()

    code = worker.run(config, plan, replace(context, heartbeat=heartbeat))
    if any(fault.kind == LATE for fault in waiting.values()):
        _kill(context.directory)
    return code


def _marker(context: WorkerContext, number: int) -> Path:
    """The file that says that a fault has happened."""
    return context.directory / f"fault_{number}"


def later(delay_s: float, act: Callable[[], object]) -> None:
    """Call `act` in a thread after a while, wherever the rank is then."""

    def wait() -> None:
        time.sleep(delay_s)
        act()

    threading.Thread(target=wait, daemon=True).start()


def _kill(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segfault(_: Path) -> None:
    ctypes.string_at(0)


def _exception(_: Path) -> None:
    raise RuntimeError("planted exception")


def _cut(_: Path) -> None:
    """Close all connections of this rank to others, as a network does that fails."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                one.shutdown(socket.SHUT_RDWR)


def _slow(_: Path) -> None:
    time.sleep(SLOW_S)


def _full_disk(_: Path) -> None:
    """Let the next file of a checkpoint find no room."""
    name = files.write_safetensors.__name__

    def fail(*_: object, **__: object) -> None:
        setattr(storage, name, files.write_safetensors)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank.safetensors")

    setattr(storage, name, fail)


def _torn(directory: Path) -> None:
    """Cut the end of a file of the newest checkpoint, and die."""
    for file in _files(directory)[:1]:
        os.truncate(file, file.stat().st_size // 2)
    _kill(directory)


def _flipped(directory: Path) -> None:
    """Flip one bit in a tensor of the newest checkpoint, and die."""
    for file in _files(directory)[:1]:
        content = bytearray(file.read_bytes())
        position = random.Random(len(content)).randrange(len(content) // 2, len(content))
        content[position] ^= 1 << random.Random(position).randrange(8)
        file.write_bytes(content)
    _kill(directory)


def _files(directory: Path) -> list[Path]:
    newest = list(complete_steps(directory).values())[-1:]
    return [file for folder in newest for file in sorted(folder.glob("*.safetensors"))]


def _lose_launcher(_: Path) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[Path], None]] = {
    "kill": _kill,
    LATE: _kill,
    "stop": _stop,
    "segfault": _segfault,
    "exception": _exception,
    "network cut": _cut,
    SLOW: _slow,
    "full disk": _full_disk,
    "torn file": _torn,
    "flipped bit": _flipped,
    "lost launcher": _lose_launcher,
}
