"""Failures of ranks: what went wrong, which failure is the root cause, and the message for the user.

A rank that loses its connection to a failed rank fails too, within milliseconds. It is a victim, not the cause. So
failures are compared by kind first (`Failure.order`) and by time second.
"""

from __future__ import annotations

import json
import re
import resource
import shlex
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from parallelrun.base import errors, reserve, user_code
from parallelrun.base.errors import EnvironmentProblem, ParallelrunError, Problem
from parallelrun.base.records import typed, write_json
from parallelrun.distributed import sequences
from parallelrun.launch.failures.stall import StalledOperation
from parallelrun.launch.host.heartbeat import Heartbeat, HeartbeatFile
from parallelrun.launch.host.job import ConsoleOptions
from parallelrun.launch.host.position import Position
from parallelrun.planner.contract.plan import Plan

CAUSE, SUSPECT, TIMED_OUT, LOST_PEER = range(4)  # Failure.order, from causes to victims
GRACE_S = 1.0  # after the first failure: time for other ranks to write theirs
MAX_LINES = 25  # of an error message
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|recvValue failed|failed to recv"
    r"|sendBytes failed|connection was (closed|aborted)|remote process exited|Connection timed out",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"Timed out waiting|timeout after|Wait timeout|operation timed out", re.IGNORECASE)
_OPEN_FILES = re.compile(r"Too many open files", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"^OutOfMemoryError|DefaultCPUAllocator: can't allocate memory")
_TORCH_ERRORS = ("RuntimeError", "ConnectionError", "DistError", "DistBackendError", "DistNetworkError",
                 "DistStoreError")  # fmt: skip
_SIGNAL_HINTS = {
    "SIGKILL": "likely the out-of-memory killer: see dmesg",
    "SIGSEGV": "a crash in native code: the stack is in the log",
    "SIGBUS": "often a full /dev/shm",
    "SIGABRT": "native code gave up: see the log",
}
# a message that begins so continues the sentence "rank 2 (...)"
_VERBS = ("died:", "died, or ", "lost ", "blocked:", "waited ", "hangs:", "stopped ")


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `what` is one line; `time_ns` is CLOCK_MONOTONIC; frames: of the user's own code.

    host: of the rank that failed; lost: ranks that the writer has seen exit or stop without a message, and what it saw;
    memory: there was too little of it; position: of the rank, if it hangs; stall: the operation that does not end.
    """

    rank: int
    what: str
    exit_code: int
    time_ns: int = field(default_factory=lambda: time.monotonic_ns())
    order: int = CAUSE
    pid: int = 0
    step: int = 0
    phase: str = ""
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    frames: tuple[str, ...] = ()
    host: str = field(default_factory=socket.gethostname)
    lost: tuple[tuple[int, str], ...] = ()
    memory: bool = False
    position: Position | None = None
    stall: StalledOperation | None = None

    def at(self, heartbeat: Heartbeat, pid: int) -> Failure:
        """Return this failure with the step and phase of the rank's last heartbeat, and its pid."""
        return replace(self, pid=pid, step=heartbeat.step, phase=heartbeat.phase)


def of_exception(error: BaseException, rank: int, time_ns: int, single_rank: bool = False) -> Failure:
    """Return the Failure of a rank whose worker raised. In a run of a single rank the exit code is 1 instead of 6."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, ParallelrunError):
        order = LOST_PEER if error.of_another_rank else CAUSE
        return Failure(rank, str(error), error.exit_code, time_ns, order, problems=error.problems, traceback=text)
    chain = errors.cause_chain(error)
    if room := errors.full_disk(error):
        return Failure(rank, f"no room to write: {room}", EnvironmentProblem.exit_code, time_ns, traceback=text)
    if any(_OPEN_FILES.search(str(e)) for e in chain):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        problem = Problem(
            f"rank {rank} may not open more files: the limit is {limit}", "ulimit -n", command="ulimit -n 65536"
        )
        return Failure(rank, problem.what, EnvironmentProblem.exit_code, time_ns, problems=(problem,), traceback=text)
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
    reason = f"{type(error).__name__}: {first_line}".rstrip(": ")
    from_torch = [str(e) for e in chain if type(e).__name__ in _TORCH_ERRORS]
    if any(map(_LOST_PEER.search, from_torch)):
        return Failure(rank, f"lost its peers ({reason})", errors.EXIT_RANK_DIED, time_ns, LOST_PEER, traceback=text)
    if any(map(_TIMED_OUT.search, from_torch)):
        return Failure(rank, f"waited too long ({reason})", errors.EXIT_HANG, time_ns, TIMED_OUT, traceback=text)
    code = ParallelrunError.exit_code if single_rank else errors.EXIT_RANK_DIED
    memory = any(isinstance(e, MemoryError) or _OUT_OF_MEMORY.search(f"{type(e).__name__}: {e}") for e in chain)
    return Failure(rank, reason, code, time_ns, traceback=text, frames=tuple(user_code.frames(error)), memory=memory)


def of_exit(rank: int, status: int, time_ns: int, out_of_memory: bool = False) -> Failure:
    """Return the Failure of a rank that wrote none. status: its exit code, or minus the number of a signal."""
    if status >= 0:
        return Failure(rank, f"exit {status} without an exception", errors.EXIT_RANK_DIED, time_ns)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    memory = out_of_memory and name == "SIGKILL"
    hint = "the out-of-memory killer" if memory else _SIGNAL_HINTS.get(name)
    # native threads abort when they lose a peer, so an abort is the cause only if there is no other failure
    order = SUSPECT if name == "SIGABRT" else CAUSE
    reason = f"died: {name}" + (f" ({hint})" if hint else "")
    return Failure(rank, reason, errors.EXIT_RANK_DIED, time_ns, order, memory=memory)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: causes before victims, then the earliest."""
    return min(failures, key=lambda failure: (failure.order, failure.time_ns))


def of_mismatch(directory: Path) -> Failure | None:
    """Return the Failure of a rank that issued different collectives in its first steps; None if there is none."""
    mismatch = sequences.first_mismatch(sequences.read_all(directory))
    if mismatch is None:
        return None
    return Failure(mismatch.suspects[0], mismatch.problem().what, errors.EXIT_RANK_DIED, problems=(mismatch.problem(),))


def explained(failure: Failure, directory: Path) -> Failure:
    """Return the mismatch of collectives that led to `failure`, if there is one, else `failure`."""
    mismatch = None if failure.problems else of_mismatch(directory)
    if mismatch is None:
        return failure
    return replace(
        mismatch, pid=failure.pid if failure.rank == mismatch.rank else 0, step=failure.step, phase=failure.phase
    )


def write_failure(directory: Path, failure: Failure) -> None:
    """Write a rank's failure to `errors/rank_<n>.json`."""
    (directory / "errors").mkdir(mode=0o700, exist_ok=True)
    write_json(directory / "errors" / f"rank_{failure.rank}.json", asdict(failure))


def read_failure(directory: Path, rank: int) -> Failure | None:
    """Return the failure that `rank` has written; None if there is none or it is incomplete."""
    try:
        fields = json.loads((directory / "errors" / f"rank_{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    written: Failure = typed(Failure, fields)
    return written


def record(directory: Path, heartbeats: HeartbeatFile, failure: Failure) -> None:
    """Write a rank's failure to its file, or to memory that the launcher sees if the disk is full."""
    try:
        reserve.insist(directory, reserve.ERRORS, partial(write_failure, directory, failure))
    except OSError:
        heartbeats.report_failure(failure.rank, failure.exit_code, failure.order, failure.what)


def recorded(directory: Path, heartbeats: HeartbeatFile, rank: int, pid: int) -> Failure | None:
    """Return the failure that a rank of this host has recorded, in its file or in memory; None if there is none."""
    recorded_failure, reported = read_failure(directory, rank), heartbeats.reported_failure(rank)
    if recorded_failure is None and reported is not None:
        exit_code, order, reason = reported
        recorded_failure = Failure(rank, reason, exit_code, order=order).at(heartbeats.read(rank), pid)
    return recorded_failure


def message(failure: Failure, plan: Plan, directory: Path, options: ConsoleOptions = ConsoleOptions()) -> list[str]:
    """Return at most MAX_LINES lines: what failed, on which rank and step, and how to resume."""
    log = directory / "logs" / f"rank_{failure.rank}.log"
    lines = [*headline(failure, plan), *how_to_resume(directory, options), f"  log: {log}"]
    if options.verbose and failure.traceback:
        lines += ["", *failure.traceback.rstrip().splitlines()]
    half = MAX_LINES // 2
    return lines if len(lines) <= MAX_LINES else [*lines[:half], "  ...", *lines[-half:]]


def headline(failure: Failure, plan: Plan) -> list[str]:
    """Return lines that say what failed, on which rank and step."""
    rank = failure.rank
    lines = [line for problem in failure.problems for line in problem.lines()]
    if not lines:
        separator = " " if failure.what.startswith(_VERBS) else ": "
        process = f"{coordinate(plan, rank)}, {failure.host}" + (f", pid {failure.pid}" if failure.pid else "")
        lines = [f"error: rank {rank} ({process}){separator}{failure.what}"]
    phase = f", phase {failure.phase}" if failure.phase else ""
    lines += failure.stall.lines() if failure.stall else []
    return [*lines, f"  at: rank {rank}, step {failure.step}{phase}", *(f"  in: {frame}" for frame in failure.frames)]


def how_to_resume(directory: Path, options: ConsoleOptions) -> list[str]:
    """Return lines with the newest complete checkpoint and the command that resumes from it."""
    saved = last_checkpoint(directory)
    if saved is None:
        return ["  last good checkpoint: none"]
    words = [word for word in options.overrides if not word.startswith("resume=")]
    command = shlex.join([*words, f"resume={saved[1]}"])
    return [f"  last good checkpoint: step {saved[0]}", f"  resume with: parallelrun {command}"]


def coordinate(plan: Plan, rank: int) -> str:
    """Return `dp=1 tp=1 pp=0` for a worker, `server 0` for a server."""
    if plan.role(rank) == "server":
        return f"server {rank - plan.num_workers}"
    degrees = plan.mesh.coordinate(rank)
    return " ".join(f"{axis}={degrees.get(axis, 0)}" for axis in ("dp", "tp", "pp"))


def last_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """Return (step, path) of a run's newest checkpoint. One that is being written has a hidden name."""
    steps = [path for path in directory.glob("checkpoints/step_*") if path.is_dir() and path.name[5:].isdigit()]
    return max(((int(path.name[5:]), path) for path in steps), default=None)
