"""Bytes kept for backward: what autograd really holds in our layers equals the formula."""

from __future__ import annotations

import pytest
from parallelrun.strategies.tensor.megatron.plan import Way

from tests.pool import run_ranks
from tests.tensor_cases import gpt_plan, held_by_layer, llama, saved_by_block

SIZES = {"model.hidden": 32, "model.seq": 16, "model.layers": 1, "model.ffn": 96, "model.vocab": 50}
SEQUENCE = {"strategy.tensor.sequence_parallel": True}
APART = {"strategy.tensor.overlap": False}
SCALAR = 8  # torch's own cross-entropy keeps the sum of its weights
GENERATOR = 5056  # torch's checkpoint keeps the state of the random generator

GPT = [
    {},
    {"precision.name": "bf16"},
    {"dropout": 0.1},
    {"model.attention_dropout": 0.1, "precision.name": "bf16"},
]


@pytest.mark.parametrize("sequence", [{}, SEQUENCE], ids=["whole", "sequence"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("overrides", [*GPT, llama(), llama() | {"precision.name": "bf16"}], ids=str)
def test_saved_bytes_are_those_of_the_formula(overrides, tp, sequence):
    apart = APART if "model.norm" in overrides else {}
    counted, predicted = run_ranks(tp, saved_by_block, {**SIZES, **overrides, **sequence, **apart, "tp": tp})[0]
    for name in predicted:
        assert abs(counted[name] - predicted[name]) <= SCALAR, (name, counted, predicted)


@pytest.mark.parametrize("overrides", [{}, {"precision.name": "bf16"}, llama(precision__name="bf16")], ids=str)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_recomputed_block_holds_what_the_formula_says(overrides, mode):
    held, expected = run_ranks(1, held_by_layer, {**SIZES, **overrides, "recompute": mode})[0]
    slack = GENERATOR if mode == "full" else 0
    assert expected <= held <= expected + slack, (held, expected)


def test_recomputation_and_sequence_parallel_save_memory():
    whole, selective, full, sliced = (
        predicted("layers.0", {"tp": 2, **overrides})
        for overrides in ({}, {"recompute": "selective"}, {"recompute": "full"}, SEQUENCE)
    )
    assert full < selective < whole and sliced < whole


def predicted(block: str, overrides: dict) -> int:
    _, plan = gpt_plan({**SIZES, **overrides})
    return Way().saved_bytes(plan.spec.block(block), plan)
