"""`profile=[2]`: a trace of the step on every rank, in which each collective is named by its axis and purpose."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.planner.predict import prediction
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from parallelrun.training.metrics.profiler import StepProfiler
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks

PARTS = {"read samples", "forward and backward", "finish gradients", "optimizer"}


def profiled_steps(overrides: dict[str, Any], directory: str) -> None:
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    profiler = StepProfiler(training.mesh, config, Path(directory))
    for step in (1, 2, 3):
        with profiler.watch(step):
            train_step(training, step, 0.01, LossScaler(config.precision, False))


def names(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(
    "overrides",
    [
        {"dp": 2},
        {"tp": 2},
        {"dp": 2, "strategy.data.kind": "fsdp"},
        {"pp": 2, "microbatches": 2},
    ],
    ids=["dp", "tp", "fsdp", "pp"],
)
def test_the_collectives_of_a_profiled_step_are_those_of_the_plan(overrides: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, profiled_steps, {**overrides, "profile": [2]}, str(tmp_path))
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"step_2_rank_0.json", "step_2_rank_1.json"}
    plan = tiny_plan(overrides)
    for rank in range(2):
        found = names(tmp_path / "profile" / f"step_2_rank_{rank}.json")
        assert found.keys() >= PARTS
        calls = {name: count for name, count in found.items() if ": " in name}
        assert calls == {f"{c.axis} {c.purpose}: {c.operation}": c.calls for c in prediction.collectives(plan, rank)}


@pytest.mark.parametrize("steps", [[0], [4], [2, 99]])
def test_a_step_that_the_run_does_not_have_is_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"profile=.* is not one of the steps 1 to 3"):
        tiny_plan(profile=steps)
