"""Who died without a word under another launcher, and who writes status.json when that was rank 0. Torch-free.

Our own launcher sees its ranks end. Under torchrun, srun or mpirun the ranks only see each other: by what they wrote
before they left (`errors/`), by the process table of a host they share, and by silence.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parallelrun.errors import EXIT_HANG, EXIT_RANK_DIED
from parallelrun.launch import failure
from parallelrun.launch.board import Beat
from parallelrun.launch.failure import Failure
from parallelrun.launch.meeting import Peers
from parallelrun.launch.status import Status

LEADER = 0
SETTLE_S = 0.3  # between a death and its verdict: time for the others to write what they know
PATIENCE_S = 3.0  # for a leader on another host, whose process cannot be seen, to speak
BLOCKED_S = 2.0  # a rank that has not noticed the leader's death by then waits for ever (NCCL): its watcher speaks
_TICK_S = 0.05
LOST_PEERS = 3  # Failure.order of those who only lost a connection


def died(rank: int, by: Failure, pid: int = 0) -> Failure:
    """The Failure of a rank that nobody saw end, as `by` tells it."""
    what = "died: it ended without a word (killed, out of memory, or a crash in native code: see its log)"
    return Failure(rank, what, EXIT_RANK_DIED, time.monotonic_ns(), 0, pid, by.step, by.phase)


def blocked(rank: int, beat: Beat) -> Failure:
    """The Failure of a rank that waits for one that is gone."""
    what = "lost rank 0 and waits for it in vain"
    return Failure(rank, what, EXIT_RANK_DIED, time.monotonic_ns(), LOST_PEERS, os.getpid(), beat.step, beat.phase)


def leader_left_early(folder: Path) -> int:
    """Rank 0 made the run and never began it. Every rank says the same; the exit code."""
    if not _is_told(folder):
        Status(folder).ended(EXIT_HANG, "rank 0 left before the run began", LEADER)
    return EXIT_HANG


def cause(own: Failure, folder: Path, peers: Peers) -> Failure:
    """What came first, from what every rank has written and from who is gone without having written."""
    said = {r: found for r in range(len(peers.pids)) if (found := failure.read(folder, r))}
    first = failure.root_cause([own, *said.values()])
    silent = [r for r in range(len(peers.pids)) if r not in said and r != own.rank]
    gone = [r for r in silent if peers.is_gone(r)]
    if gone and first.order:
        return died(gone[0], own, peers.pids[gone[0]])
    if first.order == LOST_PEERS and len(silent) == 1:
        return died(silent[0], own)
    if first.order == 2 and silent:
        return replace(first, rank=silent[0], pid=0, what="hangs: all other ranks wait for it, and it does not answer")
    return first


def must_speak(own: Failure, folder: Path, peers: Peers) -> bool:
    """Does this rank, not rank 0, have to write how the run ended? It waits until that is known.

    True on the lowest rank that is left when rank 0 is gone and status.json still says `running`. A rank that is itself
    the cause does not wait for rank 0: the others only fail when it is gone.
    """
    deadline = time.monotonic() + (PATIENCE_S if own.order > 1 else 0.0)
    while not _is_told(folder):
        if peers.is_gone(LEADER):
            time.sleep(SETTLE_S)
            break
        if time.monotonic() >= deadline:
            unseen = not peers.sees(LEADER) and failure.read(folder, LEADER) is None
            return own.order > 1 and unseen and _is_heir(own.rank, folder, peers)
        time.sleep(_TICK_S)
    deadline = time.monotonic() + PATIENCE_S
    while not _is_told(folder) and time.monotonic() < deadline:
        if _is_heir(own.rank, folder, peers):
            return True
        time.sleep(_TICK_S)
    return False


def watch(rank: int, folder: Path, peers: Peers, speak: Callable[[], object]) -> None:
    """From a thread: `speak` when rank 0 is gone, this rank is the one to say so, and its worker is blocked."""

    def look() -> None:
        while not peers.is_gone(LEADER):
            time.sleep(10 * _TICK_S)
        time.sleep(BLOCKED_S)
        if not _is_told(folder) and _is_heir(rank, folder, peers):
            speak()

    if peers.sees(LEADER):
        threading.Thread(target=look, daemon=True, name="parallelrun-survivor").start()


def _is_heir(rank: int, folder: Path, peers: Peers) -> bool:
    """Is no rank between rank 0 and this one left? On other hosts, those count that have written something."""
    return not any(
        not peers.is_gone(other) if peers.sees(other) else failure.read(folder, other) is not None
        for other in range(LEADER + 1, rank)
    )


def _is_told(folder: Path) -> bool:
    """Does status.json say how the run ended?"""
    try:
        return json.loads((folder / "status.json").read_text())["state"] != "running"
    except (OSError, ValueError, KeyError):
        return False
