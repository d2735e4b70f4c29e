"""Which rank a hang is blamed on where the ranks' positions do not tell."""

from __future__ import annotations

import pytest

from parallelrun.launch.failures import hang
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.host.job import Job
from tests.plans import tiny_config, tiny_plan


@pytest.mark.parametrize(("guilty", "expected"), [([2, 3], 2), ([], 0)])
def test_the_rank_that_stands_out_is_named_not_the_first_silent_one(tmp_path, monkeypatch, guilty, expected):
    config = tiny_config(dp=4, timeout_s=1e-9)
    monkeypatch.setattr(hang, "_positions", lambda job, alive, stopped: {})
    monkeypatch.setattr(hang.stall, "find", lambda *_: None)
    monkeypatch.setattr(hang.stall, "suspects", lambda *_: (guilty, "stands out" if guilty else ""))
    failure = hang.find(Job(config, tiny_plan(dp=4), tmp_path), HeartbeatFile(4), {rank: 2**22 for rank in range(4)})
    assert failure is not None and (failure.rank, failure.exit_code) == (expected, 7)
