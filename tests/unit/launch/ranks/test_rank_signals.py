"""What signals do in a rank."""

from __future__ import annotations

import os
import signal

from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.ranks import rank


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
