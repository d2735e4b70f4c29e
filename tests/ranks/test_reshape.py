"""A training changes its plan between two steps: the same numbers as one that never does, in fp64, without a disk."""

from __future__ import annotations

import pytest
import torch

from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.training.loop import reshape
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import FULL
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

STEPS, CHANGED = 4, 2
MODEL = {"model.layers": 2, "model.vocab": 33, "dataset.vocab": 33, "dropout": 0.1, "steps": STEPS,
         "precision.name": "fp64", "model.kv_heads": 2}  # fmt: skip
FOUR = {
    "ddp": {"dp": 4},
    "zero1": {"dp": 4, "strategy.data.kind": "zero1"},
    "zero2": {"dp": 4, "strategy.data.kind": "zero2"},
    "fsdp": {"dp": 4, "strategy.data.kind": "fsdp"},
    "hsdp": {"dp": 4, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "ring": {"dp": 4, "strategy.data.kind": "ring"},
    "tp": {"tp": 4},
    "grid": {"tp": 4, "layout": "2d"},
    "pp": {"pp": 4, "model.layers": 4},
    "dp_tp": {"dp": 2, "tp": 2},
    "zero1_pp": {"dp": 2, "pp": 2, "strategy.data.kind": "zero1"},
    "fsdp_tp": {"dp": 2, "tp": 2, "strategy.data.kind": "fsdp"},
    "tp_pp": {"tp": 2, "pp": 2},
    "interleaved": {"dp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2, "model.layers": 4},
    "cp": {"cp": 2, "dp": 2},
}
EXPERTS = {"model.experts": 4, "model.expert_period": 1}
SPREAD = {
    "ep1": {**EXPERTS, "dp": 4},
    "ep2": {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "zero1"},
    "ep4": {**EXPERTS, "dp": 4, "ep": 4},
    "ep2_tp": {**EXPERTS, "dp": 2, "ep": 2, "tp": 2},
}
PLANS = {**FOUR, **SPREAD}
NAMES, EP = list(FOUR), list(SPREAD)
# every plan is left for two others and reached from two others
ALL = [(name, NAMES[(number + ahead) % len(NAMES)]) for ahead in (1, 6) for number, name in enumerate(NAMES)]
ALL += [(name, EP[(number + 1) % len(EP)]) for number, name in enumerate(EP)]
PAIRS = ALL if FULL else [("zero1_pp", "grid")]


def config_of(names, *more):
    """The plan of the first name; all names have as many layers."""
    layers = max(PLANS[name].get("model.layers", 2) for name in names)
    return {**MODEL, **PLANS[names[0]], "model.layers": layers}


def train(plans, optimizer):
    """Train under the plans in turn, `CHANGED` steps each; (loss, norm) of every step, and the bytes that moved."""
    training, out, num_bytes = None, [], []
    scaler = LossScaler(PrecisionConfig(), scaled=False)
    for number, overrides in enumerate(plans):
        changes = {**overrides, **optimizer}
        config, plan = tiny_config(changes), tiny_plan(changes)
        if training is None:
            training = build(config, plan, torch.device("cpu"))
        else:
            before = training
            training, moved = reshape.moved(before, config, plan)
            num_bytes.append(moved)
            before.data.end_run()
            before.close()
        for step in range(number * STEPS // len(plans) + 1, (number + 1) * STEPS // len(plans) + 1):
            result = train_step(training, step, 0.01, scaler)
            out.append((result.loss, result.grad_norm))
    training.close()
    return out, num_bytes


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_training_that_changes_its_plan_equals_one_that_does_not(pair, run_ranks):
    first, second = config_of(pair), config_of(pair[::-1])
    optimizer = {"optimizer.name": "adamw"}
    expected, _ = run_ranks(4, train, [first], optimizer)[0]
    found, num_bytes = run_ranks(4, train, [first, second], optimizer)[0]
    assert len(found) == STEPS and found[:CHANGED] == expected[:CHANGED] and num_bytes[0] > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=0)


@pytest.mark.skipif(not FULL, reason="--matrix=full")
def test_running_statistics_and_momentum_move_too(run_ranks):
    plans = [{**RESNET, "dropout": 0.0, "precision.name": "fp64", "steps": STEPS, **plan}
             for plan in ({"dp": 2}, {"dp": 2, "strategy.data.kind": "fsdp"})]  # fmt: skip
    optimizer = {"optimizer.name": "sgd", "optimizer.momentum": 0.9}
    expected, _ = run_ranks(2, train, plans[:1], optimizer)[0]
    found, _ = run_ranks(2, train, plans, optimizer)[0]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10, abs=0)
