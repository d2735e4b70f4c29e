"""Ranks that another launcher has started: which of them died without a message, and which rank reports it.

Our own launcher sees its ranks exit. These ranks only see each other: by the failures that they write before they exit
(`errors/`), in the process table of a shared host, and by silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelrun.base.errors import EXIT_HANG, EXIT_RANK_DIED
from parallelrun.launch.failures import failure
from parallelrun.launch.failures.failure import CAUSE, LOST_PEER, SUSPECT, TIMED_OUT, Failure
from parallelrun.launch.host import position
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.os_process import is_stopped, start_time
from parallelrun.launch.host.position import Position
from parallelrun.launch.store.rendezvous import Member

LEADER = 0
REPORT_S = 0.3  # after a death: time for the others to write their failures
LEADER_S = 3.0  # time for a leader on another host, whose process is not visible, to report
BLOCKED_S = 2.0  # a rank that has not noticed the leader's death by then is blocked (NCCL), so its watcher reports
SURVIVORS_S = 5.0  # time for ranks on other hosts to notice a failure and write theirs
HANG_NOTICED_S = 4.0  # after the own failure, in a hang: time for all others to notice it and write where they are
_HEAD_START_S = 0.2
_DIED = "died: it exited without a message (killed, out of memory, or a crash in native code: see its log)"
_SILENT = "died, or its host was cut off: it has left no message (see its log)"
_STOPPED = "stopped (SIGSTOP): all other ranks wait for it"
_TICK_S = 0.05


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

    def lost(self) -> tuple[tuple[int, str], ...]:
        """The ranks of this host that have exited or stopped without a message, and which of both."""
        silent = [
            rank for rank in sorted(self.visible - {self.rank}) if failure.read_failure(self.folder, rank) is None
        ]
        exited = [(rank, _DIED) for rank in silent if self.has_exited(rank)]
        return (*exited, *((rank, _STOPPED) for rank in silent if is_stopped(self.members[rank].pid)))

    def cause(self, own: Failure) -> Failure:
        """Return the root cause, from what ranks have written and seen of the others on their hosts.

        Some survivors of a failure on another host notice it late, so a victim waits for all that can still write.
        """
        deadline = time.monotonic() + (SURVIVORS_S if own.order > SUSPECT and self._has_other_hosts else 0.0)
        while True:
            written, silent, seen = self._reports(own)
            first = failure.root_cause(written.values())
            lost = sorted(seen.items())
            is_settled = first.order <= SUSPECT or lost or len(silent) <= 1
            if is_settled or time.monotonic() >= deadline:
                break
            time.sleep(_TICK_S)
        if first.order <= CAUSE or not silent:
            return first
        if lost:
            return self._lost_rank(*lost[0], own)
        if first.order == LOST_PEER and len({self.members[rank].host for rank in silent}) == 1:
            return self._lost_rank(silent[0], _SILENT if silent[0] not in self.visible else _DIED, own)
        if first.order == TIMED_OUT:
            return self._lost_rank(silent[0], "hangs: all other ranks wait for it, and it does not answer", own)
        return first

    def _reports(self, own: Failure) -> tuple[dict[int, Failure], list[int], dict[int, str]]:
        """Return the failures that ranks have written, the ranks that have written none, and what ranks on the hosts of
        these have seen of them."""
        written = {m.rank: report for m in self.members if (report := failure.read_failure(self.folder, m.rank))}
        written[own.rank] = own
        silent = [m.rank for m in self.members if m.rank not in written]
        seen = dict([*self.lost(), *(pair for report in written.values() for pair in report.lost)])
        return written, silent, {rank: seen[rank] for rank in silent if rank in seen}

    def positions(self, own: Failure) -> dict[int, Position]:
        """Return where all ranks are that hang, as they have written it, and which are stopped or do not answer.

        A rank that has not noticed yet is waited for.
        """
        deadline = own.time_ns / 1e9 + HANG_NOTICED_S
        while True:
            written, silent, seen = self._reports(own)
            if time.monotonic() >= deadline or len(seen) == len(silent):
                break
            time.sleep(_TICK_S)
        reported = {rank: report.position for rank, report in written.items() if report.position is not None}
        how = {_STOPPED: position.STOPPED, _DIED: "has exited"}
        return reported | {rank: Position(how.get(seen.get(rank, ""), position.SILENT)) for rank in silent}

    def _lost_rank(self, rank: int, message: str, own: Failure) -> Failure:
        member = self.members[rank]
        code = EXIT_RANK_DIED if message in (_DIED, _SILENT) else EXIT_HANG
        return Failure(rank, message, code, pid=member.pid, step=own.step, phase=own.phase, host=member.host)

    @property
    def _has_other_hosts(self) -> bool:
        return len(self.visible) < len(self.members)

    def must_report(self, own: Failure, must_end: Callable[[], bool] = lambda: False) -> bool:
        """Return whether this rank, which is not rank 0, must record how the run ended. It waits until that is known.

        True on the lowest remaining rank if rank 0 has exited, stopped or does not answer, and status.json still says
        `running`. A rank that is itself the cause does not wait for rank 0, because the others only fail after it has
        exited. must_end: whether the launcher has asked this rank to end, and will soon kill it: then it does not wait.
        """
        is_victim = own.order > SUSPECT or own.exit_code == EXIT_HANG  # all ranks of a hang notice it by themselves
        deadline = time.monotonic() + (LEADER_S if is_victim else 0.0)
        while not is_recorded(self.folder):
            if self.has_exited(LEADER):
                time.sleep(REPORT_S)
                break
            if time.monotonic() >= deadline or must_end():
                return is_victim and self._leader_is_silent() and self.is_first_to_report()
            time.sleep(_TICK_S)
        deadline = time.monotonic() + LEADER_S
        while not is_recorded(self.folder) and time.monotonic() < deadline:
            if self._is_lowest_remaining():
                return True
            time.sleep(_TICK_S)
        return False

    def _leader_is_silent(self) -> bool:
        """Return whether rank 0, whose process has not been seen to exit, is stopped or has written nothing."""
        if LEADER in self.visible:
            return is_stopped(self.members[LEADER].pid)
        return failure.read_failure(self.folder, LEADER) is None

    def is_first_to_report(self) -> bool:
        """Return whether no other rank has taken this task; a lower rank has a head start to take it."""
        time.sleep(min(_HEAD_START_S * self.rank, LEADER_S))
        try:
            (self.folder / "errors").mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(self.folder / "errors" / "reporter", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # a full disk: rather twice than never
            return True
        return not is_recorded(self.folder)

    def wait_recorded(self) -> None:
        """Wait until the end of the run is recorded, as long as ranks of other hosts may need for it."""
        deadline = time.monotonic() + SURVIVORS_S
        while not is_recorded(self.folder) and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def end_stopped(self) -> None:
        """Kill the stopped ranks of this host if the end of the run is recorded.

        They cannot end by themselves, and their launcher would wait for them: torchrun for 30 s, or for ever.
        """
        if is_recorded(self.folder):
            for member in (self.members[rank] for rank in self.visible):
                if is_stopped(member.pid) and start_time(member.pid) == member.born:
                    with contextlib.suppress(OSError):
                        os.kill(member.pid, signal.SIGKILL)

    def watch_leader(self, heartbeats: HeartbeatFile, report: Callable[[Failure], object]) -> None:
        """Start a thread that calls `report` if rank 0 exits, this rank must report it, and its worker is blocked."""

        def watch() -> None:
            while not self.has_exited(LEADER):
                time.sleep(10 * _TICK_S)
            time.sleep(BLOCKED_S)
            if not is_recorded(self.folder) and self._is_lowest_remaining():
                blocked = Failure(self.rank, "blocked: rank 0 has exited", EXIT_RANK_DIED, order=LOST_PEER)
                report(blocked.at(heartbeats.read(self.rank), os.getpid()))

        if LEADER in self.visible:
            threading.Thread(target=watch, daemon=True, name="parallelrun-watch-leader").start()

    def _is_lowest_remaining(self) -> bool:
        """Return whether no rank between rank 0 and this one remains. Those on other hosts remain until they write."""
        return all(
            self.has_exited(other) if other in self.visible else failure.read_failure(self.folder, other) is None
            for other in range(LEADER + 1, self.rank)
        )


def is_recorded(folder: Path) -> bool:
    """Return whether status.json says how the run ended."""
    try:
        return bool(json.loads((folder / "status.json").read_text())["state"] != "running")
    except (OSError, ValueError, KeyError):
        return False
