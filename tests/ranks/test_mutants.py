"""Every planted bug is caught by verify's comparison, and the same plan without it passes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import assert_equal, parity

BASE = {
    "model.vocab": 37,
    "dataset.vocab": 37,
    "model.label_smoothing": 0.1,
    "global_batch": 16,
    "optimizer.clip": 0.05,
}
DP = {"dp": 2}
TP = {"tp": 2}
PP = {"pp": 2}
SEQUENCE = {"tp": 2, "strategy.tensor.sequence_parallel": True}
FSDP = {"dp": 2, "strategy.data.kind": "fsdp"}
MUTANTS = {
    "dropped_gradient_reduce": DP,
    "doubled_gradient_reduce": DP,
    "mean_for_sum": DP,
    "wrong_group": {"dp": 2, "tp": 2},
    "max_for_sum": TP,
    "input_gradient_not_reduced": TP,
    "skipped_block": PP,
    "untied_embedding": PP,
    "bias_added_by_every_rank": TP,
    "norm_counts_replicas": TP,
    "label_smoothing_by_shard": TP,
    "fsdp_divides": FSDP,
    "fsdp_divides_below_the_root": FSDP,
    "partial_norms": SEQUENCE,
    "stale_weights": {"dp": 2, "strategy.data.kind": "zero1"},
    "local_count": DP,
    "same_samples_everywhere": DP,
    "initial_weights_by_rank": DP,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_caught_by_the_verdict(mutant: str) -> None:
    document = parity({**BASE, **MUTANTS[mutant]}, mutant)  # a crash would prove nothing about the comparison
    assert not document["passed"]


@pytest.mark.parametrize("overrides", [DP, TP, PP, SEQUENCE, FSDP, {"dp": 2, "tp": 2}], ids=str)
def test_the_same_plan_without_a_bug_passes(overrides: dict[str, Any]) -> None:
    assert_equal(parity({**BASE, **overrides}))
