"""What went wrong with which rank, which of it came first, and how to say so in a few lines. Torch-free.

A rank whose peer vanished fails too, within milliseconds: it is a victim, never the cause. So causes are ordered by
kind first (signals, exceptions and exits, then aborts, then lost connections) and by time second.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from parallelrun import reserve, sequences, user_code
from parallelrun.errors import EXIT_HANG, EXIT_RANK_DIED, EnvironmentProblem, ParallelrunError, Problem
from parallelrun.plan.structure import Plan
from parallelrun.records import write_json

_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|recvValue failed|failed to recv"
    r"|sendBytes failed|connection was (closed|aborted)|remote process exited|Connection timed out",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"Timed out waiting|timeout after|Wait timeout|operation timed out", re.IGNORECASE)
_OF_TORCH = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "ConnectionError")
MAX_LINES = 25


@dataclass(frozen=True)
class Failure:
    """How one rank failed. `what` is one line; `time_ns` CLOCK_MONOTONIC; `order` 0 for causes, more for victims."""

    rank: int
    what: str
    exit_code: int
    time_ns: int
    order: int = 0
    pid: int = 0
    step: int = 0
    phase: str = ""
    problems: tuple[Problem, ...] = ()
    traceback: str = ""
    frames: tuple[str, ...] = ()


def of_exception(error: BaseException, rank: int, time_ns: int, traceback: str, alone: bool = False) -> Failure:
    """The Failure of a rank whose worker raised. alone: there is no other rank, so an exception is a failed run (1)."""
    if isinstance(error, ParallelrunError):
        order = 3 if error.of_another_rank else 0
        return Failure(rank, str(error), error.exit_code, time_ns, order, problems=error.problems, traceback=traceback)
    chain = list(_chain(error))
    if any(isinstance(e, OSError) and e.errno in reserve.NO_ROOM for e in chain):
        return Failure(rank, f"no room to write: {error}", EnvironmentProblem.exit_code, time_ns, traceback=traceback)
    name = type(error).__name__
    what = f"{name}: {_first_line(str(error))}".rstrip(": ")
    torch_said = [str(e) for e in chain if type(e).__name__ in _OF_TORCH]
    if any(_LOST_PEER.search(text) for text in torch_said):
        return Failure(rank, f"lost its peers ({what})", EXIT_RANK_DIED, time_ns, order=3, traceback=traceback)
    if any(_TIMED_OUT.search(text) for text in torch_said):
        return Failure(rank, f"waited too long ({what})", EXIT_HANG, time_ns, order=2, traceback=traceback)
    code = ParallelrunError.exit_code if alone else EXIT_RANK_DIED
    return Failure(rank, what, code, time_ns, traceback=traceback, frames=tuple(user_code.frames(error)))


def of_exit(rank: int, status: int, time_ns: int, out_of_memory: bool = False) -> Failure:
    """The Failure of a rank that ended without a word. status: exit code, or minus the signal's number."""
    if status >= 0:
        return Failure(rank, f"exit {status} without an exception", EXIT_RANK_DIED, time_ns)
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = {
        "SIGKILL": "the out-of-memory killer" if out_of_memory else "likely the out-of-memory killer: see dmesg",
        "SIGSEGV": "a crash in native code: the stack is in the log",
        "SIGBUS": "often a full /dev/shm",
        "SIGABRT": "native code gave up: see the log",
    }.get(name)
    what = f"died: {name}" + (f" ({hint})" if hint else "")
    # native threads abort when a peer is lost, so an abort is the cause only where nothing better is known
    return Failure(rank, what, EXIT_RANK_DIED, time_ns, order=1 if name == "SIGABRT" else 0)


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that came first, victims last."""
    return min(failures, key=lambda failure: (failure.order, failure.time_ns))


def of_mismatch(directory: Path) -> Failure | None:
    """The Failure of ranks that have issued different collectives in their first steps; None when they have not."""
    found = sequences.first_mismatch(sequences.read_all(directory))
    if found is None:
        return None
    problem = found.problem()
    return Failure(found.suspects[0], problem.what, EXIT_RANK_DIED, time.monotonic_ns(), problems=(problem,))


def explained(failure: Failure, directory: Path) -> Failure:
    """The same failure, or the mismatch of collectives that a hang, a crash or a lost connection came from."""
    found = None if failure.problems else of_mismatch(directory)
    if found is None:
        return failure
    return replace(found, pid=failure.pid if failure.rank == found.rank else 0, step=failure.step, phase=failure.phase)


def write(directory: Path, failure: Failure) -> None:
    """Keep a rank's failure as `errors/rank_<n>.json`."""
    (directory / "errors").mkdir(mode=0o700, exist_ok=True)
    write_json(_path(directory, failure.rank), {**asdict(failure), "host": socket.gethostname()})


def read(directory: Path, rank: int) -> Failure | None:
    """What rank `rank` wrote before it ended; None when it could not."""
    try:
        fields: dict[str, Any] = json.loads(_path(directory, rank).read_text())
    except (OSError, ValueError):
        return None
    fields = {name: fields[name] for name in Failure.__dataclass_fields__}
    fields["problems"] = tuple(Problem(**problem) for problem in fields["problems"])
    fields["frames"] = tuple(fields["frames"])
    return Failure(**fields)


def block(
    failure: Failure, plan: Plan, directory: Path, overrides: Sequence[str] = (), verbose: bool = False
) -> list[str]:
    """The last words on the screen: what, which rank where, at which step, how to go on. At most MAX_LINES lines."""
    lines = problem_lines(failure.problems)
    coordinate = f"{coordinates(plan, failure.rank)}, {socket.gethostname()}, pid {failure.pid}"
    if not failure.problems:
        separator = " " if failure.what.split(" ")[0] in ("died:", "lost", "waited", "hangs:", "stopped") else ": "
        lines.append(f"error: rank {failure.rank} ({coordinate}){separator}{failure.what}")
    phase = f", phase {failure.phase}" if failure.phase else ""
    lines.append(f"  at: rank {failure.rank}, step {failure.step}{phase}")
    lines += [f"  in: {frame}" for frame in failure.frames]
    lines += how_to_resume(directory, overrides)
    lines.append(f"  log: {directory / 'logs' / f'rank_{failure.rank}.log'}")
    if verbose and failure.traceback:
        lines += ["", *failure.traceback.rstrip().splitlines()]
    if len(lines) > MAX_LINES:
        keep = MAX_LINES // 2
        lines = [*lines[:keep], "  ...", *lines[-keep:]]
    return lines


def problem_lines(problems: Iterable[Problem]) -> list[str]:
    """The shape of every error message."""
    lines = []
    for problem in problems:
        lines.append(f"error: {problem.what}")
        parts = (("  where", problem.where), ("  did you mean", problem.suggestion), ("  try", problem.command))
        lines += [f"{label}: {text}" for label, text in parts if text]
    return lines


def how_to_resume(directory: Path, overrides: Sequence[str]) -> list[str]:
    """The newest complete checkpoint, and the command that goes on from it."""
    saved = last_checkpoint(directory)
    if saved is None:
        return ["  last good checkpoint: none"]
    kept = [word for word in overrides if not word.startswith("resume=")]
    command = shlex.join([*kept, f"resume={saved[1]}"])
    return [f"  last good checkpoint: step {saved[0]}", f"  resume with: parallelrun {command}"]


def coordinates(plan: Plan, rank: int) -> str:
    """`dp=1 tp=1 pp=0`, or `server 0`."""
    if plan.role(rank) == "server":
        return f"server {rank - plan.num_workers}"
    coordinate = plan.mesh.coordinate(rank)
    return " ".join(f"{axis}={coordinate.get(axis, 0)}" for axis in ("dp", "tp", "pp"))


def last_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """(step, path) of the newest complete checkpoint of a run: they are renamed into place when complete."""
    found = []
    for path in directory.glob("checkpoints/step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path))
    return max(found, default=None)


def _path(directory: Path, rank: int) -> Path:
    return directory / "errors" / f"rank_{rank}.json"


def _chain(error: BaseException | None) -> Iterable[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
