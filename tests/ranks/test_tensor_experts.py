"""Experts under Megatron's tensor strategy, which cuts the inside of every one: loss and every gradient of one
device."""

from __future__ import annotations

import pytest

from parallelrun.config.schema.model_schema import RouterConfig
from tests.parity import assert_equal, parity
from tests.ranks.test_tensor_gpt import APART, SEQUENCE, assert_proved
from tests.tensor_cases import llama

# Two layers, the second with experts. Weights of the test have a spread of 0.2: choices are far from even.
EXPERTS = {"model.experts": 4, "model.expert_ffn": 24, "model.seq": 8}
GSHARD = RouterConfig(kind="gshard", second_expert="random", capacity_factor=1.0, z_coefficient=0.1)
SWITCH = RouterConfig(kind="switch", top_k=1, renormalise="none", capacity_factor=1.0, jitter=0.1)
CHOICE = RouterConfig(kind="expert_choice", capacity_factor=1.0, aux_coefficient=0.0)
AUX_FREE = RouterConfig(score="sigmoid", scaling=2.5, bias_rate=1e-3, aux_coefficient=1e-4)
ROUTERS = {"top_k": RouterConfig(), "gshard": GSHARD, "switch": SWITCH, "choice": CHOICE, "aux_free": AUX_FREE}
SHARED = {"model.shared_experts": 1}


def experts(router: RouterConfig, **overrides):
    return {"tp": 2, **EXPERTS, "model.router": router, **overrides}


@pytest.mark.parametrize("sequence", [{}, SEQUENCE], ids=["whole", "sequence"])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_experts_train_as_on_one_device(router, sequence):
    assert_proved(experts(router, **sequence))


@pytest.mark.parametrize("overrides", [{}, SEQUENCE, {**SEQUENCE, **APART}], ids=["whole", "sequence", "apart"])
def test_a_shared_expert_sends_for_itself(overrides):
    assert_proved(experts(AUX_FREE, **llama(), **SHARED, **overrides, tp=4))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("overrides", [{}, SEQUENCE, {"dropout": 0.1}, SHARED, {**SHARED, **SEQUENCE}], ids=str)
def test_recomputed_experts_send_again_what_is_predicted(overrides, recompute):
    assert_proved(experts(GSHARD, recompute=recompute, **overrides))


def test_zero_bubble_separates_the_collectives():
    assert_proved(experts(GSHARD, **SHARED, **SEQUENCE), pipeline="zero_bubble")


def test_other_precisions_differ_by_their_rounding():
    assert_proved(experts(AUX_FREE, **SHARED, **{"precision.name": "fp32", "model.bias": False}), bound=1e-5)


# Whole training runs of three steps, the auxiliary loss as the loop scales it
TRAINED = {
    "model.experts": 4, "model.shared_experts": 1, "model.router.kind": "gshard", "model.router.capacity_factor": 1.0,
    "model.router.second_expert": "random", "model.router.aux_coefficient": 0.1, "microbatches": 2, "tp": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        SEQUENCE,
        {"recompute": "full", "dp": 2},
        {**SEQUENCE, "pp": 2, "strategy.pipeline.kind": "zero_bubble"},
        {"pp": 2, "recompute": "full", "dropout": 0.1, "strategy.pipeline.kind": "zero_bubble"},
    ],
    ids=str,
)
def test_a_training_run_is_that_of_one_device(overrides):
    assert_equal(parity({**TRAINED, **overrides}))
