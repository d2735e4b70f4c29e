"""Where rounding is part of what `verify` compares, routing decisions are held and the routers' scores compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.models.moe.router import Router
from parallelrun.training.loop.build import Training
from parallelrun.training.verify.trace import decisions_are_held
from tests.matrix import FULL
from tests.parity import assert_equal, parity
from tests.plans import tiny_config, tiny_plan

# With these seeds a token's scores tie but for fp16's rounding: without held decisions the gradients of an expert
# differ by 3e-2 and 1.5e-1, and the bound is 8e-3.
EXPERTS: dict[str, Any] = {
    "dp": 2, "tp": 2, "pp": 2, "strategy.tensor.sequence_parallel": True, "strategy.data.compression": "fp16",
    "model.experts": 8, "model.layers": 4, "model.seq": 32, "global_batch": 16, "microbatches": 8,
    "dataset.samples": 128, "seed": 10,
}  # fmt: skip
ROUTERS: dict[str, dict[str, Any]] = {
    "top two": {"model.router.kind": "top_k", "model.router.top_k": 2},
    "switch": {"model.router.kind": "switch", "model.router.top_k": 1, "model.router.capacity_factor": 1.25},
}


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS if FULL else ["switch"])
def test_scores_that_tie_but_for_rounding_are_decided_alike(router: str) -> None:
    document = parity({**EXPERTS, **ROUTERS[router]})
    assert_equal(document)
    assert document["routing_held"] and 0 < document["max_error"]["router_scores"] < document["tolerance"]


def shifted_scores(training: Training) -> None:
    """The plan's routers see other scores than the reference's: a bug that held decisions alone would hide."""
    for part in training.model_parts:
        for module in part.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(lambda _, args: (args[0] * 1.2,))


def test_scores_that_differ_are_seen() -> None:
    only_dp = {"tp": 1, "pp": 1, "microbatches": 1, "strategy.tensor.sequence_parallel": False}
    document = parity({**EXPERTS, **ROUTERS["top two"], **only_dp}, fault=shifted_scores)
    assert not document["passed"]
    assert document["max_error"]["router_scores"] > document["tolerance"]


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        ({"strategy.data.compression": "fp16"}, True),
        ({"strategy.data.compression": "none"}, False),
        ({"strategy.data.compression": "fp16", "model.experts": 0}, False),
        ({"strategy.data.compression": "none", "verify.precision": "fp32"}, True),
    ],
)
def test_exact_comparisons_in_fp64_hold_nothing(overrides: dict[str, Any], held: bool) -> None:
    asked = {"dp": 2, "model.experts": 8, "model.router.kind": "top_k", "model.router.top_k": 2, **overrides}
    if not asked["model.experts"]:
        asked = {key: value for key, value in asked.items() if "router" not in key}
    assert decisions_are_held(tiny_config(asked), tiny_plan(asked)) is held


def test_a_reference_in_fp32_follows_the_plan_too() -> None:
    document = parity({"tp": 2, "model.experts": 8, "model.router.kind": "top_k", "model.router.top_k": 2,
                       "verify.precision": "fp32"})  # fmt: skip
    assert_equal(document)
    assert document["routing_held"]
    assert torch.tensor(document["max_error"]["router_scores"]) < 1e-5
