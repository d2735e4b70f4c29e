"""A mixture trains on the same samples under every plan and after a resume, and its counts are recorded."""

from __future__ import annotations

import json

import pytest
import torch

from parallelrun.base.context import WorkerContext
from parallelrun.training.loop import training_loop
from parallelrun.training.loop.build import build
from parallelrun.training.metrics.recorder import Recorder
from tests.plans import tiny_config, tiny_plan
from tests.ranks.test_checkpoint_training import SAVED, train, world

PARTS = [
    {"name": "synthetic", "samples": 9, "weight": 0.55},
    {"name": "synthetic", "samples": 40, "vocab": 20, "weight": 0.35},
    {"name": "synthetic", "samples": 50, "vocab": 5, "weight": 0.1},
]
MIXTURE = {"dataset.name": "mixture", "dataset.mixture": PARTS, "dataset.vocab": None, "dropout": 0.0}


def test_every_plan_has_the_losses_of_one_rank_and_a_resumed_run_the_same_bits(tmp_path, run_ranks):
    whole = run_ranks(1, train, tmp_path / "one", MIXTURE, None)[0]
    for name, degrees in {"dp4": {"dp": 4}, "pp2_tp2": {"pp": 2, "tp": 2, "microbatches": 4}}.items():
        plan = {**MIXTURE, **degrees}
        found = run_ranks(world(plan), train, tmp_path / name, plan, None)[0]
        assert found == pytest.approx(whole, rel=1e-5), name
    half = tmp_path / "one" / "checkpoints" / f"step_{SAVED}"
    rest = run_ranks(1, train, tmp_path / "rest", MIXTURE, half)[0]
    assert rest == {step: loss for step, loss in whole.items() if step > SAVED}


def run_whole(folder):
    changes = {**MIXTURE, "model.vocab": 33, "steps": 4, "global_batch": 20, "checkpoint.last": False}
    training = build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))
    context = WorkerContext(
        0, 1, 0, torch.device("cpu"), folder, lambda *_: None, lambda: False, lambda step: None, console_owner=False
    )
    return training_loop.train(training, context, Recorder(training, context))


def test_samples_and_epochs_of_each_part_are_recorded(tmp_path, run_ranks):
    assert run_ranks(1, run_whole, tmp_path)[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["samples_synthetic"] for row in rows] == [11, 22, 33, 44]
    assert [row["samples_synthetic_3"] for row in rows] == [2, 4, 6, 8]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mixture"][0] == {"label": "synthetic", "samples": 44, "epochs": 44 / 9}
