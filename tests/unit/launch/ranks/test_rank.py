"""The exit code of a rank, its exit, and what signals do in it."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch.distributed as dist

from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.ranks import rank


@pytest.mark.parametrize("after", [None, RuntimeError("cannot release un-acquired lock")])
def test_ctrl_c_is_130_whatever_fails_because_of_it(monkeypatch, after):
    def interrupted(*_):
        try:
            raise KeyboardInterrupt
        finally:
            if after is not None:
                raise after

    monkeypatch.setattr(rank, "_work", interrupted)
    assert rank.serve(job=None, settings=None, heartbeats=None) == 130


def test_rank_0_which_serves_the_store_exits_last(monkeypatch):
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    store = dist.HashStore()
    rank._count_finished(store, world=2)  # as rank 1
    threading.Timer(0.3, store.add, ("exited", 1)).start()  # as rank 1, which needs the store until then
    rank._leave(store, rank=0, world=2)
    assert store.add("exited", 0) == 2


def test_a_closed_terminal_does_not_end_a_rank_and_sigterm_asks_all_to_stop():
    heartbeats = HeartbeatFile(2)
    pid = os.fork()
    if not pid:
        rank.take_signals(heartbeats)
        for number in (signal.SIGHUP, signal.SIGTTOU, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert heartbeats.stop_requested()
