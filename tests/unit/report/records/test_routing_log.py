"""routing.jsonl: a row a step, bounded on disk and in memory, and what the summary says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallelrun.planner.model.model_spec.router import RouterSpec
from parallelrun.planner.pieces import routing_statistics as statistics
from parallelrun.report.records import routing_log
from parallelrun.report.records.routing_log import FILE, RoutingLog

ROUTER = RouterSpec(
    kind="top_k", top_k=2, score="softmax", renormalise="before", scaling=1.0, capacity_factor=1.0,
    eval_capacity_factor=None, min_capacity=1, drop_policy="position", second_expert="all", group_samples=1,
    aux_coefficient=0.01, z_coefficient=0.0, jitter=0.0, bias_rate=0.0,
)  # fmt: skip


def layer(name: str, load: list[float], kept: list[float], aux: float = 2.0) -> dict:
    """8 tokens in one group, as `training.loop.router_step.RoutingUpdater.described` tells of them."""
    scalars = {"tokens": 8.0, "groups": 1.0, "aux": aux}
    vector = [*load, *kept, *(scalars.get(name, 0.0) for name in statistics.SCALARS)]
    return {"layer": name, **statistics.describe(vector, ROUTER, 8), "all_to_all_bytes": 64}


SKEWED = layer("layers.1.moe", [12.0, 4.0, 0.0, 0.0], [4.0, 4.0, 0.0, 0.0])
EVEN = layer("layers.3.moe", [4.0] * 4, [4.0] * 4, aux=1.0)


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def test_a_step_has_every_layer_and_metrics_get_the_means(tmp_path: Path) -> None:
    means = RoutingLog(tmp_path, steps=10).step(1, [SKEWED, EVEN])
    assert means == {"max_vio": pytest.approx((2.0 + 0.0) / 2), "drop_rate": pytest.approx((0.5 + 0.0) / 2),
                     "aux_loss": pytest.approx(1.5)}  # fmt: skip
    (row,) = rows(tmp_path)
    assert row["schema"] == 1 and row["step"] == 1 and [one["layer"] for one in row["layers"]] == [
        "layers.1.moe", "layers.3.moe"]  # fmt: skip
    assert set(row["layers"][0]) == {
        "layer", "load", "kept", "drop_first", "drop_second", "overflow", "capacity_used", "max_vio", "load_entropy",
        "router_entropy", "aux", "z_loss", "all_to_all_bytes",
    }  # fmt: skip
    assert row["layers"][0]["load"] == [12, 4, 0, 0] and all(isinstance(n, int) for n in row["layers"][0]["load"])


def test_the_summary_is_of_the_first_and_the_last_ten_steps(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path, steps=30)
    for step in range(1, 31):
        log.step(step, [SKEWED if step <= 10 else EVEN])
    said = log.summary()
    assert said == {"first_max_vio": pytest.approx(2.0), "max_vio": 0.0, "drop_rate": 0.0, "load_entropy": 1.0}


def test_the_summary_of_a_short_run_is_of_its_halves(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path, steps=4)
    for layer in (SKEWED, SKEWED, EVEN, EVEN):
        log.step(1, [layer])
    assert (log.summary()["first_max_vio"], log.summary()["max_vio"]) == (pytest.approx(2.0), 0.0)
    single = RoutingLog(tmp_path, steps=1)
    single.step(1, [SKEWED])
    assert single.summary()["first_max_vio"] == single.summary()["max_vio"] == pytest.approx(2.0)


def test_of_a_long_run_of_a_large_model_not_every_step_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(routing_log, "NUMBERS_WRITTEN", 2 * 4 * 10)  # ten steps of one layer of four experts
    log = RoutingLog(tmp_path, steps=100)
    for step in range(1, 101):
        assert log.step(step, [EVEN])["max_vio"] == 0.0  # metrics.jsonl has every step
    assert [row["step"] for row in rows(tmp_path)] == [1, *range(10, 101, 10)]


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path, steps=300)
    for step in range(1, 301):
        log.step(step, [EVEN])
    assert max(len(value) for value in vars(log).values() if hasattr(value, "__len__")) == 10


def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path / "gone", steps=2)
    assert log.step(1, [EVEN])["max_vio"] == 0.0 and log.summary()["load_entropy"] == 1.0


def test_without_experts_nothing_is_written(tmp_path: Path) -> None:
    log = RoutingLog(tmp_path, steps=2)
    assert log.step(1, []) == {} and log.summary() == {} and not (tmp_path / FILE).exists()
