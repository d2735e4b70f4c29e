"""What the paired benchmarks keep and conclude."""

from __future__ import annotations

import json

import pytest

from benchmarks import pairs


def test_a_new_measurement_replaces_its_own_row_and_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "RESULTS", tmp_path)
    pairs.write("some", {"command": "first"}, [{"case": "ddp", "size": "mixed", "ratio": 1.0}, {"case": "tp"}])
    path = pairs.write("some", {"command": "second"}, [{"case": "ddp", "size": "mixed", "ratio": 0.9}])
    rows = json.loads(path.read_text())["rows"]
    found = [(row["case"], row.get("ratio"), row["environment"]["command"]) for row in rows]
    assert found == [("tp", None, "first"), ("ddp", 0.9, "second")]


def test_a_ratio_holds_by_the_designs_rule():
    """Median at most bar + 0.03 and lower bound at most the bar."""
    theirs = [1.0] * 30
    summary = pairs.summarise({"ours": [1.02] * 30, "theirs": theirs, "again": theirs}, 1.0)
    assert summary["ratio"] == pytest.approx(1.02) and not summary["holds"], "an interval above the bar"
    mixed = [0.98, 1.04] * 15
    assert pairs.summarise({"ours": mixed, "theirs": theirs, "again": theirs}, 1.0)["holds"]
    assert not pairs.summarise({"ours": [1.05] * 30, "theirs": theirs, "again": theirs}, 1.0)["holds"]


def test_what_lies_beyond_a_floor_is_compared_without_it():
    times = {"ours": [3.0] * 20, "theirs": [5.0] * 20, "again": [5.0] * 20, "product": [2.0] * 20, "torchs": [3.0] * 20}
    found = pairs.beyond(times, "product", "torchs")
    assert found["beyond_ratio"] == pytest.approx(0.5) and found["beyond_a_a"] == pytest.approx(1.0)


def test_cpu_seconds_are_compared_beside_the_time():
    times = {"ours": [2.0] * 4, "theirs": [1.0] * 4, "again": [1.0] * 4}
    assert pairs.summarise(times, None)["cpu_ratio"] is None
    summary = pairs.summarise({**times, "ours_cpu": [1.0, 3.0, 3.0], "theirs_cpu": [2.0, 6.0, 1.0]}, None)
    assert summary["ratio"] == 2.0 and summary["cpu_ratio"] == 0.5


def test_every_side_is_timed_in_turn():
    called: list[str] = []
    times = pairs.time_pairs(lambda: called.append("ours"), lambda: called.append("theirs"), pairs=2, warmup=1)
    assert called.count("ours") == 6 and called.count("theirs") == 6
    assert {name: len(values) for name, values in times.items()} == {
        f"{name}{kind}": 2 for name in ("ours", "theirs", "again") for kind in ("", "_cpu")
    }
