"""A forward pass joins small microbatches: how many, and that the plan of the training stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.pipeline import evaluation
from tests.plans import tiny_config

SIZES: dict[str, Any] = {"global_batch": 24, "microbatches": 12}


@pytest.mark.parametrize(("overrides", "expected"), [({}, 1), ({"pp": 2}, 2), ({"pp": 4, "model.layers": 4}, 4)])
def test_one_microbatch_is_left_for_each_stage(overrides: dict[str, Any], expected: int) -> None:
    plan = resolve(tiny_config({**SIZES, **overrides}))
    joined = evaluation.in_larger_microbatches(plan).batch
    assert joined.microbatches == expected
    assert joined.micro_batch * joined.microbatches == plan.batch.replica_batch == 24
    assert plan.batch.micro_batch == 2


@pytest.mark.parametrize(("fitting", "expected"), [(1, 12), (2, 6), (5, 3), (11, 2), (12, 1)])
def test_no_more_are_joined_than_fit(fitting: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(tiny_config(SIZES))
    saved = max(plan.tensor.saved_bytes(block, plan) for block in plan.spec.blocks)
    monkeypatch.setattr(evaluation, "MOST_BYTES", fitting * saved)
    assert evaluation.in_larger_microbatches(plan).batch.microbatches == expected
