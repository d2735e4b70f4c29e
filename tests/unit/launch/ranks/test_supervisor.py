"""What a supervision leaves behind; its timeouts are in test_times.py, real ranks in tests/cli."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest

from parallelrun.launch.host import os_process
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import processes
from parallelrun.launch.ranks.supervisor import Supervisor
from tests.plans import tiny_config, tiny_plan


def test_a_supervision_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A sweep supervises hundreds of runs in one process."""
    job = Job(tiny_config(dp=2), tiny_plan(dp=2), tmp_path)
    before = os.listdir("/proc/self/fd")
    Supervisor(job).end_all()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_end_of_a_supervision_reaps_the_ranks_that_it_kills(tmp_path: Path) -> None:
    """A sweep's launcher goes on for hours: zombies would use up its processes."""
    supervisor = Supervisor(Job(tiny_config(dp=2), tiny_plan(dp=2), tmp_path))
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    supervisor._alive[0] = pid
    supervisor.end_all()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_rank_is_reaped_with_all_that_it_has_started() -> None:
    ours, theirs = os.pipe()

    def rank() -> int:
        if not os.fork():
            time.sleep(60)  # as a loader's worker that nobody stops; it has the pipe open
            os._exit(0)
        return 0

    pid = processes.fork(rank)
    os.close(theirs)
    assert os_process.reap(pid, wait=True) == 0
    assert select.select([ours], [], [], 10.0)[0] and os.read(ours, 1) == b""  # closed: nobody is left
    os.close(ours)


@pytest.mark.parametrize(
    ("codes", "code"),
    [({0: 0, 1: 0}, 0), ({0: 0, 1: 4}, 4), ({0: 7, 1: 4}, 4), ({0: 75, 1: 75}, 75), ({0: 75, 1: 0}, 75)],
)
def test_the_exit_code_of_ranks_that_have_all_returned(tmp_path: Path, codes, code) -> None:
    supervisor = Supervisor(Job(tiny_config(dp=2), tiny_plan(dp=2), tmp_path))
    supervisor._codes = codes
    assert supervisor._outcome().exit_code == code
    supervisor.end_all()
