"""A process that acts when another one has ended, in whatever way."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from parallelrun.base.errors import EXIT_RANK_DIED
from parallelrun.launch.failures.peers import Peers, is_recorded
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.os_process import is_stopped, start_time
from parallelrun.launch.store.live import path_of, period_s
from parallelrun.report.records import attempts
from parallelrun.report.records.find import STATUS
from parallelrun.report.records.read import read_object

LAUNCHER_GONE = "the launcher is gone: it was killed, and its ranks ended with it"
RANKS_GONE = "rank 0 is gone, and no other rank has told why: they were killed, or a host was lost"
PATIENCE_S = 1.0  # between the end of the last process of a run and its final status: another may still write it
_QUIET = 5  # periods without a new file from a rank on another host, until it counts as ended
_TICK_S = 0.1
_LOOK_S = 1.0


@contextlib.contextmanager
def guarded(act: Callable[[], object], meanwhile: Callable[[], object] | None = None) -> Iterator[None]:
    """Let a process of its own call `act` if this one ends inside the block. Enter it before threads are started.

    meanwhile: what it calls every second until then.
    """
    parent = os.pidfd_open(os.getpid())
    masked = signal.pthread_sigmask(
        signal.SIG_BLOCK, signal.valid_signals()
    )  # a signal must not leave the guard behind
    guard = os.fork()
    if not guard:
        _wait_and(act, parent, meanwhile)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        os.close(parent)
        yield
    finally:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


def _wait_and(act: Callable[[], object], parent: int, meanwhile: Callable[[], object] | None) -> None:
    """As the guard: call `act` when the parent has ended, and exit."""
    try:
        os.setsid()  # Ctrl-C and a scheduler's signals to the launcher's group do not reach it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        with open(os.devnull, "r+") as nothing:
            for stream in (0, 1, 2):  # whoever reads the launcher's output must not wait for this process
                os.dup2(nothing.fileno(), stream)
        for name in os.listdir("/proc/self/fd"):  # locks and sockets of the parent must end with it
            if int(name) not in (0, 1, 2, parent):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        while not select.select([parent], [], [], _LOOK_S if meanwhile else None)[0]:
            if meanwhile is not None:
                meanwhile()
        act()
    finally:
        os._exit(0)


def status_of(directory: Path, why: str) -> contextlib.AbstractContextManager[None]:
    """Guard the status of a run: if this process ends inside the block, see `conclude_abandoned`."""
    return guarded(partial(conclude_abandoned, directory, why))


def of_stopped_ranks(peers: Peers) -> contextlib.AbstractContextManager[None]:
    """On the first rank of a host: kill the host's stopped ranks once the end of the run is recorded."""
    if len(peers.members) == 1 or peers.rank != min(peers.visible, default=None):
        return contextlib.nullcontext()
    return guarded(partial(_end_stopped, peers), peers.end_stopped)


def _end_stopped(peers: Peers) -> None:
    """Look for stopped ranks until no rank is left on this host."""
    while not all(map(peers.has_exited, peers.visible)):
        peers.end_stopped()
        time.sleep(_LOOK_S)


def conclude_abandoned(directory: Path, why: str) -> None:
    """Write `failed` because of `why` into the status of a run whose launcher or rank 0 has ended, once all have.

    A process that survives knows more and goes first: it writes the final status, or goes on with the next attempt. It
    has PATIENCE_S for that after the last rank has ended.
    """
    seen, before = _Ranks(directory), attempts.read(directory)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if is_recorded(directory) or attempts.read(directory) != before:
            return
        if seen.all_have_exited():
            break  # at once: Slurm's proctrack/cgroup kills this process as soon as it has noticed
        if seen.any_lives():
            deadline = time.monotonic() + PATIENCE_S
        time.sleep(_TICK_S)
    step = read_object(directory / STATUS).get("step")
    Status(directory, step if isinstance(step, int) else 0).ended(EXIT_RANK_DIED, why)


class _Ranks:
    """The ranks of a run, as their rows in status.json and their own files in `logs/` show them."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._news: dict[int, tuple[str, float]] = {}  # the text of a rank's file, and when it came

    def any_lives(self) -> bool:
        """Return whether a rank on this host runs and is not stopped, or one on another host has written lately."""
        with contextlib.suppress(ValueError):
            rows = read_object(self._directory / STATUS).get("ranks") or []
            return any(self._lives(row, len(rows)) for row in rows)
        return False

    def all_have_exited(self) -> bool:
        """Return whether all ranks were on this host and have exited, so that no other process can write."""
        rows, here = read_object(self._directory / STATUS).get("ranks") or [], os.uname().nodename
        return bool(rows) and all(row["host"] == here and start_time(row["pid"])[:6] == "exited" for row in rows)

    def _lives(self, row: dict[str, object], num_ranks: int) -> bool:
        rank, pid = row["rank"], row["pid"]
        assert isinstance(rank, int) and isinstance(pid, int)
        if row["host"] == os.uname().nodename:
            return not (is_stopped(pid) or start_time(pid).startswith("exited"))
        with contextlib.suppress(OSError):
            text, now = path_of(self._directory, rank).read_text(), time.monotonic()
            before, since = self._news.get(rank, ("", now))
            since = now if text != before else since
            self._news[rank] = text, since
            return now - since < _QUIET * period_s(num_ranks)
        return False
