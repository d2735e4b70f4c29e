"""Failure detection: which rank hangs, from the stacks of all ranks; and a rank that ends itself. Torch-free.

A rank that waits inside a collective is a victim of a rank that does not join it. The suspect is the rank that is
stopped, outside of collectives, or at another step than the majority (ByteRobust, SOSP 2025, section 4).
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
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
    """A thread that tells how this rank fares, and ends it when it hangs: stacks to the log, `on_hang`, exit 7.

    It watches ranks that have no supervisor of ours: inline runs, and ranks of another launcher. told: why the launcher
    says that the run has failed, which this rank, waiting in a collective, may not notice: then `on_told`, and the end.
    """

    heartbeats: HeartbeatFile
    rank: int
    timeout_s: float
    log: TextIO
    on_hang: Callable[[Failure], object]
    status: Status | LiveFile | None
    told: Callable[[], Failure | None] = lambda: None
    on_told: Callable[[Failure], object] = lambda _: None
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
            if (cause := self.told()) is not None:
                self.on_told(cause)
                os._exit(cause.exit_code)
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
        state, where = rank_state(heartbeat.step, dump), position.own_position()
        waits = state.waiting or where.waits_for is not None
        does = "in a collective that not all ranks have joined" if waits else f"{where.activity} in {state.frames[0]}"
        what = f"hangs: no progress for {self.timeout_s:g} s; {does}; the stacks are in the log"
        order = TIMED_OUT if waits else SUSPECT
        return Failure(self.rank, what, EXIT_HANG, order=order, position=where).at(heartbeat, os.getpid())
