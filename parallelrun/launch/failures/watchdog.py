"""The watchdog of a rank that has no supervisor of ours: it reports the rank's progress, and ends it when it hangs."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

from parallelrun.base.errors import EXIT_HANG
from parallelrun.launch.failures.failure import SUSPECT, TIMED_OUT, Failure
from parallelrun.launch.failures.peers import is_recorded
from parallelrun.launch.host import position
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.heartbeat import Heartbeat, HeartbeatFile
from parallelrun.launch.store.live import LiveFile

_WATCH_S = 0.5


@dataclass
class Watchdog:
    """A thread that reports the pace of this rank, and ends it when it hangs: stacks to the log, `on_hang`, exit 7.

    It watches ranks that have no supervisor of ours: inline runs, and ranks of another launcher. find_loss: returns the
    loss of a host or a launcher, which this rank, waiting in a collective, may not notice: then `on_loss`, and the end.
    """

    heartbeats: HeartbeatFile
    rank: int
    timeout_s: float
    log: TextIO
    on_hang: Callable[[Failure], object]
    status: Status | LiveFile | None
    find_loss: Callable[[], Failure | None] = lambda: None
    on_loss: Callable[[Failure], object] = lambda _: None
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
            # a rank that was stopped goes on when its launcher ends the job: others have reported it
            if self.status is not None and not is_recorded(self.status.directory):
                rows = partial(self.heartbeats.rows, {self.rank: os.getpid()})
                self.status.update(heartbeat.step, self.heartbeats.failed_save(), rows)
            if (cause := self.find_loss()) is not None:
                self.on_loss(cause)
                os._exit(cause.exit_code)
            if heartbeat.age_s > self.timeout_s:
                self.on_hang(self._failure(heartbeat))
                os._exit(EXIT_HANG)

    def _failure(self, heartbeat: Heartbeat) -> Failure:
        """Write all stacks to the log. Return this rank's Failure: a rank in a collective is a victim."""
        self.log.flush()
        faulthandler.dump_traceback(self.log, all_threads=True)
        own = position.own_position()
        does = "in a collective that not all ranks have joined" if own.in_collective else own.text
        reason = f"hangs: no progress for {self.timeout_s:g} s; {does}; the stacks are in the log"
        order = TIMED_OUT if own.in_collective else SUSPECT
        return Failure(self.rank, reason, EXIT_HANG, order=order, position=own).at(heartbeat, os.getpid())
