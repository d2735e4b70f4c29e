"""Scaling efficiency in a sweep: which points are compared, and with what."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from parallelrun.base.records import append_jsonl
from parallelrun.report.sweeps import scaling
from parallelrun.report.sweeps import sweep_table as sweep


def row(point: int, world: int, rate: float | None, *overrides: str, batch: int = 48, **more: Any) -> dict[str, Any]:
    degrees = {"dp": world, "tp": 1, "pp": 1, "ep": 1, "servers": 0}
    return {"point": point, "state": "done", "world": world, **degrees, "global_batch": batch, "samples_per_s": rate,
            "overrides": [f"world={world}", *overrides], "strategy": "ddp", "config_sha256": str(point),
            **more}  # fmt: skip


def test_ranks_that_add_what_they_should_are_efficient():
    rows = [row(0, 2, 100.0), row(1, 4, 160.0), row(2, 8, 400.0)]
    assert scaling.efficiencies(rows) == {
        0: ("strong", 1.0), 1: ("strong", pytest.approx(0.8)), 2: ("strong", pytest.approx(1.0)),
    }  # fmt: skip


def test_a_batch_that_grows_with_the_ranks_is_weak_scaling():
    rows = [row(0, 2, 100.0, "local_batch=8", batch=16), row(1, 4, 150.0, "local_batch=8", batch=32)]
    assert scaling.efficiencies(rows)[1] == ("weak", pytest.approx(0.75))


def test_only_points_that_differ_in_world_and_degrees_alone_are_compared():
    ddp = [row(0, 2, 100.0, "strategy=ddp"), row(1, 4, 100.0, "strategy=ddp", "dp=2", "tp=2")]
    others = [row(2, 2, 50.0, "strategy=tp"), row(3, 4, 90.0, "strategy=tp"), row(4, 4, 9.0, "strategy=ring")]
    shares = scaling.efficiencies([*ddp, *others])
    assert shares.keys() == {0, 1, 2, 3} and shares[3][1] == pytest.approx(0.9)


def test_unfinished_points_and_equal_worlds_are_no_scaling():
    assert scaling.efficiencies([row(0, 2, 100.0), row(1, 4, None), row(2, 8, 9.0, state="failed")]) == {}
    assert scaling.efficiencies([row(0, 4, 100.0, "dp=4"), row(1, 4, 90.0, "tp=4")]) == {}


def test_of_several_points_of_the_smallest_world_the_fastest_sets_the_ideal():
    rows = [row(0, 2, 50.0, "tp=2"), row(1, 2, 100.0, "dp=2"), row(2, 4, 160.0, "dp=4")]
    assert [share for _, share in scaling.efficiencies(rows).values()] == pytest.approx([0.5, 1.0, 0.8])


def test_table_and_csv_show_the_efficiency(tmp_path, capsys):
    append_jsonl(tmp_path / sweep.RESULTS, row(0, 2, 100.0))
    sweep.show(tmp_path)
    assert "efficiency" not in capsys.readouterr().out
    append_jsonl(tmp_path / sweep.RESULTS, row(1, 4, 160.0, ranks_per_core=2.0))
    sweep.show(tmp_path)
    text = capsys.readouterr().out
    assert "efficiency" in text and " 80%" in text and "strong scaling" in text and "no scaling measurement" in text
    sweep.write_csv(tmp_path)
    with open(tmp_path / "results.csv", newline="") as file:
        rows = [(line["scaling"], line["efficiency"]) for line in csv.DictReader(file)]
    assert rows == [("strong", "1.0"), ("strong", "0.8")]
