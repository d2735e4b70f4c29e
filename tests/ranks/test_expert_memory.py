"""Bytes that a layer with experts keeps for backward: autograd holds what the tensor strategy and the expert dispatcher
say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallelrun.distributed.mesh import build_mesh
from parallelrun.models import dropout, initialise
from parallelrun.training.loop.build import build_model_parts
from tests.live_bytes import saving
from tests.pool import run_ranks
from tests.tensor_cases import batch_of, gpt_plan

# experts choose, so that every load is even; z_coefficient: without it the router saves what is freed before
CHOICE = {
    "model.layers": 1, "model.hidden": 32, "model.ffn": 96, "model.seq": 16, "model.experts": 4,
    "model.expert_period": 1, "model.router.kind": "expert_choice", "model.router.z_coefficient": 0.1,
    "dp": 4, "ep": 4, "global_batch": 8,
}  # fmt: skip
CASES = [
    {},
    {"strategy.expert.group_size": 2},
    {"model.activation": "swiglu", "precision.name": "bf16", "strategy.expert.chunks": 2},
    {"model.router.capacity_factor": 2.0, "precision.name": "fp32", "model.activation": "relu"},
]
FEW = 64  # a place that nobody has, of each list; where experts' rows end, in grouped products


def saved(cases: list[dict]) -> list[tuple[int, int]]:
    """Body of a rank: (bytes that the block with experts keeps, bytes predicted) of each case."""
    found = []
    for overrides in cases:
        config, plan = gpt_plan(overrides)
        mesh = build_mesh(plan, torch.device("cpu"))
        (network,) = parts = build_model_parts(config, plan, mesh)
        initialise.materialise(parts, plan, mesh, config.seed)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        tokens, _, sample_ids = batch_of(plan)
        storages: dict[int, torch.UntypedStorage] = {}

        def see(held: Tensor, storages: dict = storages) -> None:
            storages[held.untyped_storage().data_ptr()] = held.untyped_storage()

        with dropout.scope(sample_ids):
            x = network.block("embedding")(tokens)
            with saving(see):
                network.block("layers.0")(x)
        kept = sum(storage.nbytes() for address, storage in storages.items() if address not in parameters)
        block = plan.spec.block("layers.0")
        assert plan.expert is not None
        found.append((kept, plan.tensor.saved_bytes(block, plan) + plan.expert.saved_bytes(block, plan)))
    return found


@pytest.mark.parametrize("kind", ["capacity", "dropless"])
def test_saved_bytes_are_those_of_the_formulas(kind):
    cases = [{**CHOICE, "strategy.expert.kind": kind, **case} for case in CASES]
    for case, (kept, predicted) in zip(CASES, run_ranks(4, saved, cases)[0], strict=True):
        assert abs(kept - predicted) <= FEW, (case, kept, predicted)
