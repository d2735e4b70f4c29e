"""Bugs that people have had, or are easily made, in the grid tensor strategies: the verdict catches each of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import assert_equal, parity
from tests.ranks.test_grid_parity import BASE, CUBE, DEEP, DROPS, ONE_LAYER, SQUARE, form

SMALL = {**BASE, **ONE_LAYER, "verify.steps": 1}
MUTANTS: dict[str, dict[str, Any]] = {
    "depth_not_summed": DEEP,
    "rows_of_norms_not_summed": SQUARE,
    "positions_not_summed": SQUARE,
    "wrong_scatter_axis": CUBE,
    "norm_of_own_features": SQUARE,
    "norm_gradient_of_own_features": SQUARE,
    "loss_of_the_first_row_counted": SQUARE,
    "loss_of_every_column_counted": SQUARE,
    "targets_of_the_first_samples": SQUARE,
    "tokens_of_the_first_samples": SQUARE,
    "masks_of_the_first_samples": {**SQUARE, **DROPS},
    "masks_of_the_first_heads": {**SQUARE, "model.attention_dropout": 0.1},
    "inside_taken_for_outside": {**SQUARE, **form("stationary_w"), "model.attention_dropout": 0.1},
    "padding_taken_for_tokens": SQUARE,
    "vocabulary_cut_by_rows_first": SQUARE,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_caught_by_the_verdict(mutant: str) -> None:
    document = parity({**SMALL, **MUTANTS[mutant]}, mutant)  # a crash would prove nothing about the comparison
    assert not document["passed"]


@pytest.mark.parametrize("overrides", [SQUARE, {**SQUARE, **DROPS}], ids=str)  # the others: test_grid_parity
def test_the_same_plan_without_a_bug_passes(overrides: dict[str, Any]) -> None:
    assert_equal(parity({**SMALL, **overrides}))
