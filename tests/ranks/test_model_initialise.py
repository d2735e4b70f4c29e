"""Initial weights on real ranks: the same numbers whatever the plan, plain Parameters and FSDP2's shards alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import initialise
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build_model_parts
from parallelrun.training.loop.data_runtime import data_runtime
from tests.plans import tiny_config, tiny_plan
from tests.pool import run_ranks

SEED = 7
FSDP = {"dp": 2, "strategy.data.kind": "fsdp"}
LLAMA = {
    "model.kv_heads": 1,
    "model.norm": "rmsnorm",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied_embeddings": False,
}
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "tp, uneven vocab": {"tp": 2, "model.vocab": 33},
    "tp, one kv head on both ranks": {"tp": 2, **LLAMA},
    "pp, tied copy": {"pp": 2},
    "fsdp, uneven vocab": {**FSDP, "model.vocab": 33},
    "fsdp and tp": {**FSDP, "tp": 2},
    "fsdp, tied weight of two stages of a rank": {**FSDP, "pp": 2, "strategy.pipeline.kind": "zbv"},
}


def held(overrides: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Name and local values of every parameter of this rank, after the data strategy has taken them."""
    config = tiny_config(overrides)
    plan = resolve(config)
    mesh = build_mesh(plan, torch.device("cpu"))
    parts = build_model_parts(config, plan, mesh)
    data = data_runtime(plan)
    data.shard(parts, plan, mesh)
    initialise.materialise(parts, plan, mesh, SEED)
    data.attach(parts, plan, mesh)
    parameters = [pair for part in parts for pair in part.named_parameters()]
    return [(name, p.to_local() if isinstance(p, DTensor) else p) for name, p in parameters]


def values(overrides: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value.detach().clone()) for name, value in held(overrides)]


@pytest.mark.parametrize("overrides", PLANS.values(), ids=PLANS)
def test_every_rank_holds_its_part_of_the_same_logical_weights(overrides: dict[str, Any]) -> None:
    plan = tiny_plan(overrides)
    original = dict(plan.spec.tied)
    whole = {name: initialise.logical(spec, SEED) for name, spec in plan.spec.parameters.items()}
    seen = set()
    for rank, parameters in enumerate(run_ranks(plan.world, values, overrides)):
        for name, value in parameters:
            logical = original.get(name, name)
            spec = plan.spec.parameters[logical]
            layout = plan.data.weight_layout(spec, plan.tensor.layout(spec, plan), plan)
            ranges = layout.ranges(spec.shape, plan.mesh.sizes, plan.mesh.coordinate(rank))
            expected = whole[logical][tuple(slice(*pair) for pair in ranges)]
            assert torch.equal(value, expected), f"{name} on rank {rank}"
            seen.add(logical)
    assert seen == set(plan.spec.parameters)
