"""What a supervision leaves behind; its timeouts are in test_times.py, real ranks in tests/cli."""

from __future__ import annotations

import os
from pathlib import Path

from parallelrun.launch.rank import Job
from parallelrun.launch.supervisor import Supervisor
from tests.plans import tiny_config, tiny_plan


def test_a_supervision_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """A sweep supervises hundreds of runs in one process."""
    job = Job(tiny_config(dp=2), tiny_plan(dp=2), tmp_path)
    before = os.listdir("/proc/self/fd")
    Supervisor(job).end_all()
    assert len(os.listdir("/proc/self/fd")) == len(before)
