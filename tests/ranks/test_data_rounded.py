"""ZeRO keeps weights in the compute dtype without changing a bit: every use would have rounded them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.strategies.data.common import zero_plan
from parallelrun.training.loop.build import Training
from tests.matrix import FULL, shared
from tests.ranks.data_body import Outcome, assemble, run, start
from tests.ranks.test_data_equality import (
    INTERLEAVED,
    PIPELINE,
    SEQUENCE,
    SMALL_BUCKETS,
    ZERO1,
    ZERO2,
    on_ranks,
    shapes_of,
)  # fmt: skip

# Clipping would multiply by a norm that is summed in another order. 31 and 37 rows do not divide, so chunks are padded.
BF16 = {"precision.name": "bf16", "optimizer.clip": 0.0, "model.ffn": 31, "model.tied_embeddings": False, "dp": 2}
EXPERTS = {
    "model.experts": 4, "model.expert_period": 1, "model.router.kind": "expert_choice", "dp": 4, "ep": 2,
}  # fmt: skip
CELLS: dict[str, dict[str, Any]] = {
    "zero1, accumulation": {"microbatches": 4, **ZERO1, **SMALL_BUCKETS},
    "zero1, adamw": {"microbatches": 2, "optimizer.name": "adamw", **ZERO1},
    # Rounded, the weights of half of the rows lie where gradients have nothing but padding.
    "zero1, one row for four ranks": {"dp": 4, "model.ffn": 1, **ZERO1},
    "zero1 x tp, sequence parallel": {"tp": 2, "model.ffn": 30, **ZERO1, **SEQUENCE},
    "zero1, two stages a rank in one bucket": {**INTERLEAVED, **ZERO1},
    "zero1 x experts, rmsnorm": {**EXPERTS, "model.norm": "rmsnorm", **ZERO1},
    "zero2, accumulation in many buckets": {"microbatches": 4, **ZERO2, **SMALL_BUCKETS},
    "zero2, recomputed": {"microbatches": 2, "recompute": "full", **ZERO2},
}
FULL_MATRIX = ("zero1, accumulation", "zero1, adamw", "zero1 x tp, sequence parallel", "zero2, recomputed")


def run_as_stored(overrides: dict[str, Any]) -> Outcome:
    """Three steps with all weights in the stored dtype."""
    roles, zero_plan.ROUNDED_ROLES = zero_plan.ROUNDED_ROLES, ()
    try:
        return run(overrides)
    finally:
        zero_plan.ROUNDED_ROLES = roles


@pytest.mark.parametrize("cell", shared(cell for cell in CELLS if FULL or cell not in FULL_MATRIX))
def test_updates_are_those_of_weights_in_the_stored_dtype_bit_for_bit(cell):
    overrides = {**BF16, **CELLS[cell]}
    ours, expected = on_ranks(overrides), on_ranks(overrides, run_as_stored)
    for kind in ("gradients", "updates"):
        found, wanted = (
            assemble([getattr(one, kind) for one in results], shapes_of(overrides)) for results in (ours, expected)
        )
        assert not [name for name in wanted if not torch.equal(found[name], wanted[name])]
    for one, other in zip(ours, expected):
        assert one.losses == other.losses and one.norms == pytest.approx(other.norms, rel=1e-5)
        assert one.counted == one.predicted


def dtypes(overrides: dict[str, Any]) -> tuple[dict[str, torch.dtype], set[torch.dtype]]:
    """(dtype of each weight in the modules, dtypes of what the optimizer updates)."""
    training: Training = start(overrides)
    weights = {name: weight.dtype for part in training.model_parts for name, weight in part.named_parameters()}
    return weights, {parameter.tensor.dtype for parameter in training.parameters}


@pytest.mark.parametrize(
    "more",
    [{}, {**PIPELINE, "schedule": "zero_bubble"}, {"layout": "2d", "tp": 4, "model.ffn": 32, "model.vocab": 38}],
    ids=["rounded", "split backward", "grid"],
)
def test_only_weights_that_every_use_rounds_are_rounded_and_only_where_no_sum_would_be(more):
    """The embedding sums many rows' gradients. A split backward adds those of microbatches; a grid sums over ranks."""
    for weights, updated in on_ranks({**BF16, **ZERO1, **more}, dtypes):
        assert updated == {torch.float32}
        half = {name for name, dtype in weights.items() if dtype == torch.bfloat16}
        assert half == (set() if more else {name for name in weights if not name.startswith("embedding")}), weights
