"""Data strategies over experts that lie on a part of dp equal one device and send what the plan says, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.config.presets import values
from tests.matrix import FULL, TWO_STEPS, shared
from tests.parity import assert_equal, parity
from tests.pool import run_ranks
from tests.ranks import horovod_body
from tests.ranks.data_body import run

# 4 experts in the second of 2 layers; uneven rows of the vocabulary; clipped: a wrong norm makes a wrong update
MOE: dict[str, Any] = {
    "model.layers": 2,
    "model.experts": 4,
    "model.expert_period": 2,
    "model.vocab": 37,
    "dataset.vocab": 37,
    "global_batch": 16,
    "optimizer.clip": 0.05,
}
KIND, SHARD = "strategy.data.kind", "strategy.data.shard"
HALF, ALL = {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}
THREE = {**HALF, "model.experts": 6}  # three experts a rank, which two copies cannot deal out: they split every one
FEW = {**HALF, "model.experts": 2, "model.ffn": 33}  # one expert a rank, of which one matrix is odd: a copy gets none
ZERO1, ZERO2, FSDP, RING = ({KIND: kind} for kind in ("zero1", "zero2", "fsdp", "ring"))
SMALL_BUCKETS = {"strategy.data.bucket_mb": 0.005}
CELLS: dict[str, dict[str, Any]] = {
    "ddp, many buckets of both axes": {**HALF, "microbatches": 2, **SMALL_BUCKETS},
    "ddp, no copies of experts": {**ALL, "microbatches": 2},
    "ddp under zero bubble": {"dp": 2, "ep": 2, "pp": 2, "strategy.pipeline.kind": "zero_bubble"},
    "ring, inner groups": {**HALF, **RING, "strategy.data.algorithm": "hierarchical", "strategy.data.group_size": 2},
    "horovod": {**HALF, KIND: "horovod", "strategy.data.algorithm": "halving_doubling"},
    "zero1, inside of every expert": {**THREE, **ZERO1},
    "zero1, empty chunks": {**FEW, **ZERO1},
    "zero1, no copies of experts": {**ALL, **ZERO1, "microbatches": 2},
    "zero1 x tp": {**THREE, "tp": 2, **ZERO1},
    "zero2, accumulated in many buckets": {**THREE, "microbatches": 2, **ZERO2, **SMALL_BUCKETS},
    "zero2, no copies of experts": {**ALL, **ZERO2, "microbatches": 2},
    "fsdp, recomputed": {**THREE, "microbatches": 2, "recompute": "full", **FSDP},
    "fsdp, in parts, empty shards, gathered again": {
        **FEW, **FSDP, "strategy.expert.chunks": 2, "strategy.data.reshard_after_forward": True
    },
    "fsdp, all experts everywhere": {"dp": 4, **FSDP, "model.experts": 6},
    "fsdp, no copies of experts": {**ALL, **FSDP, "microbatches": 2},
    "fsdp x pp, gathered again": {
        "dp": 4, "ep": 2, "pp": 2, **FSDP, "strategy.data.reshard_after_forward": True, "model.expert_period": 1,
        "microbatches": 2,
    },
    "hsdp": {**THREE, "dp": 8, **FSDP, SHARD: 4},
    "hsdp whose shards are ep": {**HALF, **FSDP, SHARD: 2, "microbatches": 2},
    "hsdp whose shards are ep, in a pipeline": {**HALF, **FSDP, SHARD: 2, "pp": 2},
}  # fmt: skip
# What the full matrix adds: the same of another strategy, or on eight ranks.
FULL_MATRIX = (
    "zero1 x tp", "zero2, no copies of experts", "fsdp, all experts everywhere", "hsdp", "fsdp x pp, gathered again",
    "hsdp whose shards are ep, in a pipeline",
)  # fmt: skip


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_a_way_equals_one_device_and_sends_what_the_plan_says(cell: str) -> None:
    assert_equal(parity({**MOE, **CELLS[cell]}))


@pytest.mark.parametrize("strategy", [{**FSDP, "microbatches": 2}, *([ZERO1] if FULL else [])], ids=str)
def test_a_selection_bias_follows_the_load_however_it_is_split(strategy: dict[str, Any]) -> None:
    router = {f"model.router.{key}": value for key, value in values("strategy", "aux_free")["router"].items()}
    assert router["model.router.bias_rate"] > 0
    assert_equal(parity({**TWO_STEPS, **MOE, **HALF, **router, **strategy}))


def test_a_router_beside_rounded_weights_is_gathered_as_the_plan_says() -> None:
    for result in run_ranks(4, run, {**MOE, **HALF, **FSDP, "precision.name": "bf16"}):
        data = [row for row in result.counted if row.purpose == "engine"]
        assert data == [row for row in result.predicted if row.purpose == "engine"] != []


def gone_on_under_horovod(directory: str) -> dict[str, Tensor]:
    """This rank's weights and AdamW state in a run that goes on, for which only ranks 0 and 1 have read sense."""
    training = horovod_body.start({**MOE, **HALF, "optimizer.name": "adamw"})
    horovod_body.step(training, 1)
    held = {p.name: p.tensor.detach() for p in training.parameters}
    for p in training.parameters:
        held |= {f"{kind} of {p.name}": value for kind, value in training.optimizer.state(p.name).items()}
    read = {name: value.clone() for name, value in held.items()}
    if dist.get_rank() > 1:
        for value in held.values():
            value.add_(1)
    training.data.begin_run(training, horovod_body.context(directory), 1)
    if dist.get_rank() <= 1:
        assert all(torch.equal(value, read[name]) for name, value in held.items())
    return held


def test_horovod_hands_out_experts_to_their_copies_only(tmp_path: Path) -> None:
    first, second, third, fourth = run_ranks(4, gone_on_under_horovod, str(tmp_path))
    for name in first:
        assert torch.equal(first[name], third[name]) and torch.equal(second[name], fourth[name])
        assert torch.equal(first[name], second[name]) == (".experts." not in name or name.startswith("step"))


@pytest.mark.parametrize("where", [HALF, ALL] if FULL else [HALF], ids=str)
def test_the_classic_bug_leaves_the_first_loss_exact_and_one_kind_of_gradient_wrong(where: dict[str, Any]) -> None:
    document = parity({**MOE, **where, "verify.steps": 1}, "expert_gradients_ep_times_too_large")
    assert document["max_error"]["loss"] < 1e-12
    assert ".experts." in document["worst"]["grads"]
