"""Failure detection: which rank hangs, which rank died without a message, and who reports it. Torch-free.

A rank that waits inside a collective is a victim of a rank that does not join it. The suspect is the rank that is
stopped, outside of collectives, or at another step than the majority (ByteRobust, SOSP 2025, section 4).

Our own launcher sees its ranks exit. Under torchrun, srun or mpirun the ranks only see each other: by the failures that
they write before they exit (`errors/`), in the process table of a shared host, and by silence.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from parallelrun.errors import EXIT_HANG, EXIT_RANK_DIED
from parallelrun.launch import failure
from parallelrun.launch.directory import Status
from parallelrun.launch.failure import CAUSE, LOST_PEER, SUSPECT, TIMED_OUT, Failure
from parallelrun.launch.heartbeat import Heartbeat, HeartbeatFile
from parallelrun.launch.processes import start_time
from parallelrun.launch.rendezvous import Member

LEADER = 0
REPORT_S = 0.3  # after a death: time for the others to write their failures
LEADER_S = 3.0  # time for a leader on another host, whose process is not visible, to report
BLOCKED_S = 2.0  # a rank that has not noticed the leader's death by then is blocked (NCCL), so its watcher reports
_TICK_S = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_WAITING_CALL = re.compile(
    r"\.(wait|synchronize|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|recv|send)\("
)
_DEPTH = 4  # innermost frames in which a waiting call counts
_WATCH_S = 0.5


@dataclass(frozen=True)
class RankState:
    """A rank's last step, whether SIGSTOP has stopped it, and its main thread's stack, innermost frame first."""

    step: int
    stopped: bool = False
    frames: tuple[str, ...] = ()
    waiting: bool = False


def rank_state(step: int, dump: str, stopped: bool = False) -> RankState:
    """Return the state of a rank from faulthandler's dump of its process."""
    frames: list[str] = []
    waiting = False
    main_thread = re.split(r"(?m)^(?:Current thread|Thread) .*$", dump)[-1]
    for match in filter(None, map(_FRAME.match, main_thread.splitlines())):
        source = linecache.getline(match["file"], int(match["line"])).strip()
        inside = "torch/distributed" in match["file"] or _WAITING_CALL.search(source) is not None
        waiting = waiting or (inside and len(frames) < _DEPTH)
        frames.append(f"{match['function']} ({match['file']}:{match['line']})")
    return RankState(step, stopped, tuple(frames), waiting)


def suspects(states: Mapping[int, RankState]) -> tuple[list[int], str]:
    """Return the ranks that block the others and the reason; an empty list if all ranks look alike."""
    if stopped := [rank for rank, state in states.items() if state.stopped]:
        return stopped, "stopped (SIGSTOP)"
    silent = [rank for rank, state in states.items() if not state.frames]
    if silent and len(silent) < len(states):
        return silent, "gave no stack"
    outside = [rank for rank, state in states.items() if not state.waiting]
    if outside and len(outside) < len(states):
        return outside, f"not in a collective but in {states[outside[0]].frames[0]}"
    keys: dict[str, Callable[[RankState], tuple[object, ...]]] = {
        "at step": lambda state: (state.step,),
        "at": lambda state: state.frames[:2],
    }
    for label, key in keys.items():
        values = {rank: key(state) for rank, state in states.items()}
        ((common, count),) = Counter(values.values()).most_common(1)
        odd = [rank for rank, value in values.items() if value != common]
        if odd and count > len(odd):
            return odd, f"{label} {values[odd[0]][0]}, all others {label} {common[0] if common else common}"
    return [], ""


@dataclass
class Watchdog:
    """A thread that updates status.json and ends this rank when it hangs: stacks to the log, `on_hang`, exit 7.

    It watches ranks that have no supervisor of ours: inline runs, and ranks of another launcher.
    """

    heartbeats: HeartbeatFile
    rank: int
    timeout_s: float
    log: TextIO
    on_hang: Callable[[Failure], object]
    status: Status | None
    done: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self.watch, daemon=True, name="parallelrun-watchdog")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self._thread.join()

    def watch(self) -> None:
        """Look at the heartbeat every _WATCH_S seconds until `done` is set or the rank hangs."""
        while not self.done.wait(_WATCH_S):
            heartbeat = self.heartbeats.read(self.rank)
            if self.status is not None:
                self.status.update(heartbeat.step, self.heartbeats.failed_save())
            if heartbeat.age_s > self.timeout_s:
                self.on_hang(self._failure(heartbeat))
                os._exit(EXIT_HANG)

    def _failure(self, heartbeat: Heartbeat) -> Failure:
        """Write all stacks to the log. Return this rank's Failure: a rank in a collective is a victim."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read()
        self.log.write(dump)
        self.log.flush()
        state = rank_state(heartbeat.step, dump)
        where = "in a collective that not all ranks have joined" if state.waiting else f"in {state.frames[0]}"
        what = f"hangs: no progress for {self.timeout_s:g} s; {where}; the stacks are in the log"
        order = TIMED_OUT if state.waiting else SUSPECT
        return Failure(self.rank, what, EXIT_HANG, order=order).at(heartbeat, os.getpid())


# -- ranks of another launcher


@dataclass(frozen=True)
class Peers:
    """The processes of all ranks, as this rank sees them. folder: the run directory; visible: the ranks whose processes
    this rank can see."""

    rank: int
    folder: Path
    members: Sequence[Member]
    visible: frozenset[int]

    @classmethod
    def of(cls, rank: int, folder: Path, members: Sequence[Member]) -> Peers:
        """Return the view of `rank` at the start: it sees the ranks on its host, unless containers hide them."""
        here = [m for m in members if m.host == members[rank].host and m.born]
        return cls(rank, folder, members, frozenset(m.rank for m in here if start_time(m.pid) == m.born))

    def has_exited(self, rank: int) -> bool:
        """Return whether the process of `rank` is known to have exited."""
        return rank in self.visible and start_time(self.members[rank].pid) != self.members[rank].born

    def cause(self, own: Failure) -> Failure:
        """Return the root cause, from the failures that ranks have written and the ranks that exited without one."""
        written = {m.rank: found for m in self.members if (found := failure.read(self.folder, m.rank))}
        first = failure.root_cause([own, *written.values()])
        silent = [m.rank for m in self.members if m.rank not in written and m.rank != own.rank]
        exited = [rank for rank in silent if self.has_exited(rank)]
        died = exited[:1] if first.order > CAUSE else []
        if not died and first.order == LOST_PEER and len(silent) == 1:
            died = silent
        if died:
            what = "died: it exited without a message (killed, out of memory, or a crash in native code: see its log)"
            pid = self.members[died[0]].pid if exited else 0
            return Failure(died[0], what, EXIT_RANK_DIED, pid=pid, step=own.step, phase=own.phase)
        if first.order == TIMED_OUT and silent:
            what = "hangs: all other ranks wait for it, and it does not answer"
            return replace(first, rank=silent[0], pid=0, what=what)
        return first

    def must_report(self, own: Failure) -> bool:
        """Return whether this rank, which is not rank 0, must record how the run ended. It waits until that is known.

        True on the lowest remaining rank if rank 0 has exited and status.json still says `running`. A rank that is
        itself the cause does not wait for rank 0, because the others only fail after it has exited.
        """
        is_victim = own.order > SUSPECT
        deadline = time.monotonic() + (LEADER_S if is_victim else 0.0)
        while not is_recorded(self.folder):
            if self.has_exited(LEADER):
                time.sleep(REPORT_S)
                break
            if time.monotonic() >= deadline:
                unseen = LEADER not in self.visible and failure.read(self.folder, LEADER) is None
                return is_victim and unseen and self._is_lowest_remaining()
            time.sleep(_TICK_S)
        deadline = time.monotonic() + LEADER_S
        while not is_recorded(self.folder) and time.monotonic() < deadline:
            if self._is_lowest_remaining():
                return True
            time.sleep(_TICK_S)
        return False

    def watch_leader(self, heartbeats: HeartbeatFile, report: Callable[[Failure], object]) -> None:
        """Start a thread that calls `report` if rank 0 exits, this rank must report it, and its worker is blocked."""

        def watch() -> None:
            while not self.has_exited(LEADER):
                time.sleep(10 * _TICK_S)
            time.sleep(BLOCKED_S)
            if not is_recorded(self.folder) and self._is_lowest_remaining():
                found = Failure(self.rank, "blocked: rank 0 has exited", EXIT_RANK_DIED, order=LOST_PEER)
                report(found.at(heartbeats.read(self.rank), os.getpid()))

        if LEADER in self.visible:
            threading.Thread(target=watch, daemon=True, name="parallelrun-watch-leader").start()

    def _is_lowest_remaining(self) -> bool:
        """Return whether no rank between rank 0 and this one remains. Those on other hosts remain until they write."""
        return all(
            self.has_exited(other) if other in self.visible else failure.read(self.folder, other) is None
            for other in range(LEADER + 1, self.rank)
        )


def is_recorded(folder: Path) -> bool:
    """Return whether status.json says how the run ended."""
    try:
        return bool(json.loads((folder / "status.json").read_text())["state"] != "running")
    except (OSError, ValueError, KeyError):
        return False
