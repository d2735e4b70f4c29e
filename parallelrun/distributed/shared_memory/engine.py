"""Waiting: every wait of a process advances all its outstanding operations, in the thread that waits.

A waiter tries again for a moment if there is a core for each rank of the host, then sleeps until a peer rings or ends.
Of several waiting threads one sleeps for all. A wait in a group of gloo advances nothing here, so a process with such a
group has a thread that does, while peers need it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import Protocol

from parallelrun.distributed.shared_memory.process import LocalProcess, Peer

_SPIN_S = 5e-5  # about as long as it takes to be woken
SLEEP_S = 0.05  # a process looks this often itself: nobody wakes one that waits for a free slot
_BACKGROUND_S = 1e-3  # and this often while it may be waiting for gloo


class PendingOperation(Protocol):
    """A collective or a message. done: whether it has ended; error: how, if not well."""

    name: str
    num_bytes: int
    done: bool
    error: Exception | None

    def missing(self) -> list[Peer]:
        """Return the peers without which the operation cannot end."""
        ...

    def closed(self, peer: Peer) -> bool:
        """Return whether a peer has left the group."""
        ...


class OperationQueue(Protocol):
    """The operations of a group of one kind."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether operations are left."""
        ...

    def is_owing(self) -> bool:
        """Return whether other members may need this one's part in the operations that are left."""
        ...

    def missing(self) -> list[Peer]:
        """Return the peers without which the first operation cannot end."""
        ...


class Engine:
    """The operations of this process. `lock` is held wherever they are touched."""

    def __init__(self) -> None:
        self.process = LocalProcess()
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)  # entering this takes twice as long
        self._active: dict[OperationQueue, None] = {}
        self._sleeping = False
        self.awaited: list[PendingOperation] = []  # by each thread that waits
        self.num_cores = len(os.sched_getaffinity(0))
        self._owes: threading.Event | None = None  # set: for the thread of `advance_in_background`

    def submit(self, queue: OperationQueue) -> None:
        """Advance a queue that has a new operation; remember it while operations are left."""
        if queue.advance():
            self._active[queue] = None
            if self._owes is not None:
                self._owes.set()
        else:
            self._active.pop(queue, None)

    def advance_in_background(self) -> None:
        """From now on, also advance operations that peers need while no thread waits for any."""
        if self._owes is None:
            self._owes = threading.Event()
            threading.Thread(target=self._advance_for_peers, args=(self._owes,), daemon=True).start()

    def _advance_for_peers(self, owes: threading.Event) -> None:
        while owes.wait():
            owes.clear()
            is_owing = True
            while is_owing:
                time.sleep(_BACKGROUND_S)
                with self.mutex:
                    if not self.awaited:  # else the thread that waits advances them
                        self.progress()
                    is_owing = self.is_owing()

    def progress(self) -> None:
        """Do what can be done without waiting, for all operations."""
        for queue in tuple(self._active):
            if not queue.advance():
                self._active.pop(queue, None)

    def wait(self, operation: PendingOperation, timeout_s: float) -> None:
        """Return when the operation has ended. Raises RuntimeError as gloo does, if a peer ends or time is up."""
        if operation.done:
            return
        deadline = time.monotonic() + timeout_s
        with self.mutex:
            self.awaited.append(operation)
            try:
                if not self._spin(operation):
                    while not self._wait_once(operation, deadline):
                        if time.monotonic() > deadline:
                            message = f"[shared memory] Timed out waiting {round(timeout_s * 1e3)}ms for {operation}"
                            raise RuntimeError(message)
            finally:
                self.awaited.remove(operation)

    def _spin(self, operation: PendingOperation) -> bool:
        """Try again for a moment, if no rank of this host needs the core meanwhile."""
        if len(self.process.peers) >= self.num_cores:
            return operation.done
        until = time.monotonic() + _SPIN_S
        while time.monotonic() < until and not operation.done:
            self.lock.release()
            os.sched_yield()
            self.lock.acquire()
            self.progress()
        return operation.done

    def _wait_once(self, operation: PendingOperation, deadline: float) -> bool:
        """Sleep once, unless the operation has ended; return whether it has."""
        process = self.process
        if self._sleeping:  # another thread sleeps, for all
            self.progress()
            if not operation.done:
                self.lock.wait(SLEEP_S)
            return operation.done
        self._sleeping = True
        try:
            process.fall_asleep()
            self.progress()
            if process.has_lost_peers:
                self._look_for_ended_peers(operation)
            if operation.done:
                return True
            self.lock.release()
            try:
                process.sleep(max(min(SLEEP_S, deadline - time.monotonic()), 0.0))
            finally:
                self.lock.acquire()
        finally:
            process.awake()
            self._sleeping = False
        self.progress()
        if len(self.awaited) > 1:
            self.lock.notify_all()
        if not operation.done:
            self._look_for_ended_peers(operation)
        return operation.done

    def _look_for_ended_peers(self, operation: PendingOperation) -> None:
        """Raise RuntimeError if the operation needs a peer that has ended or left the group."""
        lost = [peer for peer in operation.missing() if peer.gone or operation.closed(peer)]
        if lost:
            self.progress()  # it may have done its part at the last moment
            if not operation.done and lost[0] in operation.missing():
                raise RuntimeError(f"[shared memory] Connection closed by peer: process {lost[0].pid}, {operation}")

    def finish(self, timeout_s: float) -> None:
        """Advance the operations until no peer needs them, or time is up. Those with ended peers are left."""
        deadline = time.monotonic() + timeout_s
        with self.lock:
            self.progress()
            while self.is_owing() and time.monotonic() < deadline:
                self.process.fall_asleep()
                self.progress()
                if self.is_owing():
                    self.process.sleep(SLEEP_S)
                self.process.awake()
                self.progress()

    def is_owing(self) -> bool:
        """Return whether peers that have not ended may need this process's part in an operation."""
        return any(queue.is_owing() and not any(peer.gone for peer in queue.missing()) for queue in self._active)


_engines: dict[int, Engine] = {}  # by pid: a fork has its own


def existing() -> Engine | None:
    """Return the engine of this process, None if it has none."""
    return _engines.get(os.getpid())


def current() -> Engine:
    """Return the engine of this process; create it at the first call. Raises OSError or EnvironmentProblem."""
    engine = existing()
    if engine is None:
        engine = _engines[os.getpid()] = Engine()
        atexit.register(_at_exit)
    return engine


def _at_exit() -> None:
    engine = existing()
    if engine is not None:
        with contextlib.suppress(RuntimeError):
            engine.finish(5.0)
