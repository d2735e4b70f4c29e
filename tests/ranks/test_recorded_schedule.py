"""A run with a pipeline records the actions of its last step, of one rank for each pp index."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.training.loop import training_loop
from parallelrun.training.loop.build import build
from parallelrun.training.metrics.recorder import Recorder
from tests.plans import tiny_config, tiny_plan

STEPS = 2
PLANS = {
    "replicas": {"pp": 2, "dp": 2, "microbatches": 2},
    "tensor ranks": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "gpipe"},
}


def train_whole(folder, changes):
    """A run of the loop with all its records; its exit code."""
    changes = {**changes, "steps": STEPS, "checkpoint.last": False}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    context = WorkerContext(
        dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"), folder, lambda *_: None, lambda: False,
        lambda step: None, console_owner=False,
    )  # fmt: skip
    try:
        return training_loop.train(training, context, Recorder(training, context))
    finally:
        training.close()


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_a_run_records_every_action_of_its_last_step_once_for_each_pp_index(changes, tmp_path, run_ranks):
    plan = tiny_plan({**changes, "steps": STEPS})
    assert run_ranks(plan.world, train_whole, tmp_path, changes) == [0] * plan.world
    document = json.loads((tmp_path / "schedule.json").read_text())
    assert document["step"] == STEPS and [row["pp"] for row in document["ranks"]] == [0, 1]
    for row, planned in zip(document["ranks"], plan.pipeline.actions(plan)):
        found = [(action["kind"], action["stage"], action["microbatch"]) for action in row["actions"]]
        assert found == [(one.kind, one.stage, one.microbatch) for one in planned]


def test_a_run_without_a_pipeline_records_none(tmp_path, run_ranks):
    assert run_ranks(1, train_whole, tmp_path, {}) == [0]
    assert (tmp_path / "summary.json").exists() and not (tmp_path / "schedule.json").exists()
