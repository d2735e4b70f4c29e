"""What a supervision leaves behind; its timeouts are in test_times.py, real ranks in tests/cli."""

from __future__ import annotations

import os
import re
import select
import signal
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


def test_a_worker_of_several_ranks_is_lost_with_any_of_them(tmp_path: Path, capsys) -> None:
    settings = {"strategy.data.kind": "ps", "strategy.data.backup_workers": 2, "dp": 4, "tp": 2, "global_batch": 12}
    supervisor = Supervisor(Job(tiny_config(settings), tiny_plan(settings), tmp_path))
    supervisor._pids = [0] * 9

    def fork(rank: int, code: int | None) -> int:
        """Fork a rank. code: below 0 a signal; None: it does not exit by itself."""

        def run() -> int:
            if code is None:
                time.sleep(60)
            elif code < 0:
                os.kill(os.getpid(), -code)
            return code or 0

        pid = processes.fork(run)
        supervisor._heartbeats.beat(rank, 1, "step")
        supervisor._alive[rank], supervisor._pidfds[rank] = pid, os.pidfd_open(pid)
        return pid

    def exit_at_once(codes: dict[int, int]) -> None:
        for pid in [fork(rank, code) for rank, code in codes.items()]:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        supervisor._reap()

    other = fork(6, None)
    for rank in (1, 3):
        supervisor._heartbeats.beat(rank, 1, "step")
    assert [supervisor._is_spare(rank, -signal.SIGKILL) for rank in (1, 3)] == [False, True], "worker 0 is not spare"
    exit_at_once({7: -signal.SIGKILL})
    assert os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
    exit_at_once({4: 1, 5: -signal.SIGKILL})  # a collective has failed on rank 4, because rank 5 has died
    assert not supervisor._failures and supervisor._lost == {4, 5, 6, 7}
    said = capsys.readouterr().err
    assert re.findall("rank (.) died: SIGKILL.* with (.) workers", said) == [("7", "3"), ("5", "2")]
    exit_at_once({3: -signal.SIGKILL})
    assert [failure.rank for failure in supervisor._failures] == [3]
    supervisor.end_all()
