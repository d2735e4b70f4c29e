"""status.json has a row for every rank, also of ranks that another launcher has started."""

from __future__ import annotations

import json
import time

from parallelrun.launch.host.directory import Status
from parallelrun.launch.store.live import GatheredStatus, LiveFile
from parallelrun.launch.store.rendezvous import Member


def rank(number):
    return {"rank": number, "pid": 1, "host": "node7", "step": 40, "phase": "step", "silent_s": 0.1}


def ranks_of(directory):
    return json.loads((directory / "status.json").read_text()).get("ranks")


def test_status_json_has_the_ranks_that_the_launcher_sees(tmp_path):
    status = Status(tmp_path)
    status.update(3, 0, lambda: [rank(0)])
    assert ranks_of(tmp_path)[0]["rank"] == 0
    status.ended(0)
    assert ranks_of(tmp_path) is None


def test_every_rank_of_another_launcher_is_gathered_and_one_that_is_not_seen_is_named(tmp_path, monkeypatch):
    members = [Member(number, f"node{number}", 10 + number, "", {}, {}, "", "", True) for number in range(3)]
    (tmp_path / "logs").mkdir()
    other = LiveFile(tmp_path, 1, 3)
    other.update(40, 0, lambda: [rank(1)])
    gathered = GatheredStatus(tmp_path, members=members)
    gathered.update(40, 0, lambda: [rank(0)])
    assert [row["rank"] for row in ranks_of(tmp_path)] == [0, 1, 2]
    assert ranks_of(tmp_path)[2] == {"rank": 2, "pid": 12, "host": "node2", "seen": False}
    now = time.monotonic() + 31
    monkeypatch.setattr("time.monotonic", lambda: now)
    gathered.update(41, 0, lambda: [rank(0)])  # rank 1 has written nothing since
    assert 31 <= ranks_of(tmp_path)[1]["silent_s"] < 32
    other.remove()
    assert not list((tmp_path / "logs").iterdir())
