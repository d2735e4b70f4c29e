"""Failure detection under another launcher: which rank died without a message, and who writes status.json then.

Our own launcher sees its ranks exit. Under torchrun, srun or mpirun the ranks only see each other: by the failures that
they write before they exit (`errors/`), in the process table of a shared host, and by silence. Torch-free.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallelrun.errors import EXIT_HANG, EXIT_RANK_DIED
from parallelrun.launch import failure
from parallelrun.launch.directory import Status
from parallelrun.launch.failure import CAUSE, LOST_PEER, SUSPECT, TIMED_OUT, Failure
from parallelrun.launch.processes import start_time
from parallelrun.launch.rendezvous import Member

LEADER = 0
REPORT_S = 0.3  # after a death: time for the others to write their failures
LEADER_S = 3.0  # time for a leader on another host, whose process is not visible, to report
BLOCKED_S = 2.0  # a rank that has not noticed the leader's death by then is blocked (NCCL), so its watcher reports
_TICK_S = 0.05


@dataclass(frozen=True)
class Peers:
    """The processes of all ranks. visible: the ranks whose processes this rank can see."""

    members: Sequence[Member]
    visible: frozenset[int]

    @classmethod
    def of(cls, rank: int, members: Sequence[Member]) -> Peers:
        """Return the view of `rank` at the start: it sees the ranks on its host, unless containers hide them."""
        here = [m for m in members if m.host == members[rank].host and m.born]
        return cls(members, frozenset(m.rank for m in here if start_time(m.pid) == m.born))

    def has_exited(self, rank: int) -> bool:
        """Return whether the process of `rank` is known to have exited."""
        return rank in self.visible and start_time(self.members[rank].pid) != self.members[rank].born


def leader_left_early(folder: Path) -> int:
    """Record that rank 0 exited before the run began. Return the exit code, the same on every rank."""
    if not _is_recorded(folder):
        Status(folder).ended(EXIT_HANG, "rank 0 exited before the run began", LEADER)
    return EXIT_HANG


def cause(own: Failure, folder: Path, peers: Peers) -> Failure:
    """Return the root cause, from the failures that ranks have written and the ranks that exited without one."""
    written = {m.rank: found for m in peers.members if (found := failure.read(folder, m.rank))}
    first = failure.root_cause([own, *written.values()])
    silent = [m.rank for m in peers.members if m.rank not in written and m.rank != own.rank]
    exited = [rank for rank in silent if peers.has_exited(rank)]
    died = exited[:1] if first.order > CAUSE else []
    if not died and first.order == LOST_PEER and len(silent) == 1:
        died = silent
    if died:
        what = "died: it exited without a message (killed, out of memory, or a crash in native code: see its log)"
        pid = peers.members[died[0]].pid if exited else 0
        return Failure(died[0], what, EXIT_RANK_DIED, pid=pid, step=own.step, phase=own.phase)
    if first.order == TIMED_OUT and silent:
        return replace(first, rank=silent[0], pid=0, what="hangs: all other ranks wait for it, and it does not answer")
    return first


def must_report(own: Failure, folder: Path, peers: Peers) -> bool:
    """Return whether this rank, which is not rank 0, must record how the run ended. It waits until that is known.

    True on the lowest remaining rank if rank 0 has exited and status.json still says `running`. A rank that is itself
    the cause does not wait for rank 0, because the others only fail after it has exited.
    """
    is_victim = own.order > SUSPECT
    deadline = time.monotonic() + (LEADER_S if is_victim else 0.0)
    while not _is_recorded(folder):
        if peers.has_exited(LEADER):
            time.sleep(REPORT_S)
            break
        if time.monotonic() >= deadline:
            unseen = LEADER not in peers.visible and failure.read(folder, LEADER) is None
            return is_victim and unseen and _is_lowest_remaining(own.rank, folder, peers)
        time.sleep(_TICK_S)
    deadline = time.monotonic() + LEADER_S
    while not _is_recorded(folder) and time.monotonic() < deadline:
        if _is_lowest_remaining(own.rank, folder, peers):
            return True
        time.sleep(_TICK_S)
    return False


def watch_leader(rank: int, folder: Path, peers: Peers, report: Callable[[], object]) -> None:
    """Start a thread that calls `report` if rank 0 exits, this rank must report it, and its worker is blocked."""

    def watch() -> None:
        while not peers.has_exited(LEADER):
            time.sleep(10 * _TICK_S)
        time.sleep(BLOCKED_S)
        if not _is_recorded(folder) and _is_lowest_remaining(rank, folder, peers):
            report()

    if LEADER in peers.visible:
        threading.Thread(target=watch, daemon=True, name="parallelrun-watch-leader").start()


def _is_lowest_remaining(rank: int, folder: Path, peers: Peers) -> bool:
    """Return whether no rank between rank 0 and this one remains. Ranks on other hosts count if they have written."""
    return all(
        peers.has_exited(other) if other in peers.visible else failure.read(folder, other) is None
        for other in range(LEADER + 1, rank)
    )


def _is_recorded(folder: Path) -> bool:
    """Return whether status.json says how the run ended."""
    try:
        return bool(json.loads((folder / "status.json").read_text())["state"] != "running")
    except (OSError, ValueError, KeyError):
        return False
