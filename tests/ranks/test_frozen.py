"""A user's module with frozen parameters under every way: equal to one device, and what is sent is what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.planner.predict import prediction
from parallelrun.training.loop import checkpointing
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.checkpoints import read_whole
from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.plans import tiny_config, tiny_plan
from tests.ranks.test_model_parity import PLACED, Frozen

MODULE: dict[str, Any] = {**PLACED, "model.vocab": 37, "dataset.vocab": 37, "dataset.name": "synthetic"}
MODULE |= {"optimizer.weight_decay": 0.1, "global_batch": 16}
BOTTOM = "embed.*|layers.0.*"  # with two stages, all of the first
TOP = "layers.1.*|head.*"
SCATTERED = "*.bias|*.norm?.weight|*.k.weight"
ZERO1, FSDP = {"strategy.data.kind": "zero1"}, {"strategy.data.kind": "fsdp"}
RESHARD = {**FSDP, "strategy.data.reshard_after_forward": True}


def schedule(kind: str) -> dict[str, Any]:
    return {"pp": 2, "strategy.pipeline.kind": kind}


CELLS = {
    "ddp": {"dp": 2, "microbatches": 2},
    "zero1": {"dp": 2, **ZERO1, "microbatches": 2},
    "fsdp": {"dp": 2, **FSDP, "strategy.data.reshard_after_forward": False, "microbatches": 2},
    "fsdp_reshard": {"dp": 2, **RESHARD, "microbatches": 2},
    "hsdp": {"dp": 4, **FSDP, "strategy.data.shard": 2},
    "tp": {"tp": 2},
    "gpipe": schedule("gpipe"),
    "1f1b": schedule("1f1b"),
    "interleaved": schedule("interleaved"),
    "zero_bubble": schedule("zero_bubble"),
    "zbv": schedule("zbv"),
    "zero1_pp": {"dp": 2, **schedule("1f1b"), **ZERO1},
    "fsdp_zbv": {"dp": 2, **schedule("zbv"), **FSDP},
    "zero1_tp_pp": {"dp": 2, "tp": 2, **schedule("1f1b"), **ZERO1},
    "fsdp_tp_zbv": {"dp": 2, "tp": 2, **schedule("zbv"), **FSDP},
}


FROZEN = {"bottom": BOTTOM, "top": TOP, "scattered": SCATTERED}
# what every run of the suite proves; `pytest --matrix=full` proves each cell with everything frozen that may be
ALWAYS = {
    "bottom": ("fsdp_reshard", "tp", "1f1b", "zero_bubble", "zero1_pp"),
    "top": ("zero1", "gpipe", "zbv"),
    "scattered": ("ddp", "fsdp", "interleaved"),
}
PROVED = [(cell, frozen) for frozen in FROZEN for cell in CELLS if FULL or cell in ALWAYS[frozen]]


@pytest.mark.parametrize("cell, frozen", PROVED)
def test_what_is_frozen_stays_and_the_rest_trains_as_on_one_device(cell: str, frozen: str) -> None:
    assert_equal(parity({**MODULE, **CELLS[cell], "model.arguments": Frozen({"frozen": FROZEN[frozen]})}))


@pytest.mark.parametrize("cell", ["zero1", "zbv"])
def test_a_frozen_weight_may_be_tied(cell: str) -> None:
    arguments = Frozen({"frozen": "embed.tokens.weight", "tied": True})
    assert_equal(parity({**MODULE, **CELLS[cell], "model.arguments": arguments}))


def frozen_under(overrides: dict[str, Any], folder: Path, resume: bool) -> dict[str, Any]:
    """Train two steps (resumed: of four), save; what this rank has of gradients, state, memory and frozen weights."""
    changes = {**MODULE, "optimizer.name": "adamw", "steps": 8, "checkpoint.keep": 9, **overrides}
    changes["resume"] = str(folder) if resume else None
    plan = tiny_plan(changes)
    training = build(tiny_config(changes), plan, torch.device("cpu"))
    scaler = LossScaler(PrecisionConfig(), scaled=False)
    start = checkpointing.load(training, scaler).get("step", 0)
    for step in (start + 1, start + 2):
        train_step(training, step, 0.01, scaler)
    said = prediction.memory(plan, training.mesh.rank)
    place = plan.mesh.coordinate(training.mesh.rank)
    row = plan.data.held_bytes(place["pp"], place, plan) if plan.data.kind == "zero1" else 0  # where a sum arrives
    modules = {name: p for part in training.model_parts for name, p in part.named_parameters()}
    weights = sum(p.numel() * p.element_size() for p in modules.values())
    gradients = 0 if plan.data.kind != "zero1" else sum(p.numel() * p.element_size() for p in reduced(training))
    state = [training.optimizer.state(p.name) for p in training.parameters]
    states = sum(v.numel() * v.element_size() for one in state for v in one.values() if v.dim())
    checkpointing.save(training, scaler, start + 2, folder)
    return {
        "gradient of frozen": [n for n, p in modules.items() if plan.spec.parameters[n].frozen and p.grad is not None],
        "said and held": [(said.weights, weights), (said.gradients - row, gradients), (said.optimizer, states)],
        "num_frozen": plan.spec.num_frozen,
    }


def reduced(training: Training) -> list[torch.Tensor]:
    """The weights whose gradients the buckets hold (with padding, which the plan leaves out)."""
    return [weight for bucket in training.data._buckets for weight in bucket.weights]


def test_it_has_no_gradient_and_no_state_and_is_saved_under_any_plan(tmp_path: Path, run_ranks: Any) -> None:
    frozen = {"model.arguments": Frozen({"frozen": BOTTOM}), "model.blocks": ("embed", "layers.*", "head")}
    fsdp, zero1 = {**frozen, "dp": 2, **FSDP}, {**frozen, "dp": 2, **ZERO1}
    everyone = [
        *run_ranks(4, frozen_under, {**zero1, "tp": 2}, tmp_path, False),
        *run_ranks(2, frozen_under, zero1, tmp_path, True),
    ]
    for seen in everyone:
        assert seen["gradient of frozen"] == [] and seen["num_frozen"] > 0
        assert all(said == held for said, held in seen["said and held"]), seen
    for seen in run_ranks(2, frozen_under, fsdp, tmp_path / "fsdp", False):
        assert seen["gradient of frozen"] == []
    first, second, sharded = (
        read_whole(tmp_path / name) for name in ("checkpoints/step_2", "checkpoints/step_4", "fsdp/checkpoints/step_2")
    )
    keys = {key for key in first if "embed.tokens" in key or "layers.0." in key}
    assert keys and not any(key.startswith("optimizer/") for key in keys)
    assert any(key.startswith("optimizer/exp_avg/module.layers.1.") for key in first)
    for key in keys:
        assert torch.equal(first[key], second[key]) and torch.equal(first[key], sharded[key]), key
    assert not torch.equal(first["model/module.head.weight"], second["model/module.head.weight"])


def test_what_is_frozen_later_keeps_its_values_and_loses_its_state(tmp_path: Path, run_ranks: Any) -> None:
    run_ranks(1, frozen_under, {}, tmp_path, False)
    run_ranks(1, frozen_under, {"model.arguments": Frozen({"frozen": TOP})}, tmp_path, True)
    run_ranks(1, frozen_under, {}, tmp_path, True)  # and may be trained again
    first, second, third = (read_whole(tmp_path / "checkpoints" / f"step_{step}") for step in (2, 4, 6))
    name = "module.head.weight"
    assert torch.equal(first[f"model/{name}"], second[f"model/{name}"]) and f"optimizer/exp_avg/{name}" not in second
    assert not torch.equal(second[f"model/{name}"], third[f"model/{name}"]) and f"optimizer/exp_avg/{name}" in third
