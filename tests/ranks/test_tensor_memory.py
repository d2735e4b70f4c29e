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


def saved_by_blocks(cases: list[dict]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Body of a rank."""
    return [saved_by_block(case) for case in cases]


GPT = [
    {},
    {"precision.name": "bf16"},
    {"dropout": 0.1},
    {"model.attention_dropout": 0.1, "precision.name": "bf16"},
]


LLAMA = [llama() | APART, llama() | APART | {"precision.name": "bf16"}]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("models", [GPT, LLAMA], ids=["gpt", "llama"])
def test_saved_bytes_are_those_of_the_formula(models, tp):
    cases = [{**SIZES, **model, **sequence, "tp": tp} for model in models for sequence in ({}, SEQUENCE)]
    for case, (counted, expected) in zip(cases, run_ranks(tp, saved_by_blocks, cases)[0], strict=True):
        for name in expected:
            assert abs(counted[name] - expected[name]) <= SCALAR, (case, name, counted, expected)


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
