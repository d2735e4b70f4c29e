"""The file by which the agent of a host and its ranks tell each other things."""

from __future__ import annotations

import io
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from parallelrun.launch import failure_detection, reach
from parallelrun.launch.environment import NOTES
from parallelrun.launch.failure_detection import Watchdog
from parallelrun.launch.heartbeat import HeartbeatFile
from parallelrun.launch.host_failures import LostHost
from parallelrun.launch.host_notes import HostNotes

LOST = LostHost("worker-2", 2, "ranks 2 to 3", "it does not answer")


def test_both_sides_read_what_the_other_has_written():
    agent = HostNotes()
    rank = HostNotes.inherited({NOTES: str(agent.descriptor)})
    assert rank is not None and agent.run is None and rank.lost is None
    rank.set_run(Path("/runs/a b"))
    agent.set_lost(asdict(LOST))
    assert (agent.run, rank.lost) == (Path("/runs/a b"), LOST)
    os.pwrite(agent.descriptor, b"\0\0\0", 16_384)  # half of it
    assert rank.lost is None and agent.run is not None
    assert HostNotes.inherited({}) is None


def test_a_rank_that_waits_is_ended_by_its_watchdog_and_the_lost_host_is_the_cause(monkeypatch):
    """The loop sees nothing for two looks, then what the agent tells."""
    notes, heartbeats, told, codes = HostNotes(), HeartbeatFile(1, first_rank=1), [], []
    heartbeats.beat(1, 12, "forward")

    def exit_(code: int) -> None:
        codes.append(code)
        done.looks = 99

    def wait(seconds: float) -> bool:
        done.looks += 1
        if done.looks == 3:
            notes.set_lost(asdict(LOST))
        return done.looks > 10

    done = SimpleNamespace(looks=0, wait=wait)
    monkeypatch.setattr(failure_detection.os, "_exit", exit_)
    look = partial(reach.told, lambda: notes.lost, None, heartbeats, 1)
    Watchdog(heartbeats, 1, 60.0, io.StringIO(), told.append, None, look, told.append, done).watch()
    (cause,) = told
    assert codes == [6] and (cause.rank, cause.host, cause.step) == (2, "worker-2", 12)
    assert cause.what == "the connection to host worker-2 (ranks 2 to 3) was lost: it does not answer"
