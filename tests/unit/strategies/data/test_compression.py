"""Compression before any rank runs: what plans promise, and the arithmetic of PowerSGD."""

from __future__ import annotations

import pytest
import torch

from parallelrun.strategies.data.common.compression.powersgd import (
    first_right_factor,
    next_right_factor,
    orthonormal,
    unit_columns,
)
from tests.plans import tiny_plan


def test_compressed_plans_promise_a_replay_and_others_one_device():
    assert tiny_plan(dp=2).equivalence.kind == "exact"
    assert tiny_plan(dp=2, strategy__data__compression="fp16").equivalence.kind == "replay"
    assert tiny_plan(dp=2, strategy__data__compression="powersgd").equivalence.kind == "replay"
    assert tiny_plan(dp=1, strategy__data__compression="powersgd").equivalence.kind == "exact"


def test_orthonormal_columns_span_the_same_space():
    torch.manual_seed(0)
    matrix = torch.randn(3, 20, 4, dtype=torch.float64)
    made = orthonormal(matrix)
    torch.testing.assert_close(made.mT @ made, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    torch.testing.assert_close(made @ (made.mT @ matrix), matrix)


def test_a_column_that_adds_nothing_becomes_zero_not_noise():
    torch.manual_seed(0)
    column = torch.randn(20, 1, dtype=torch.float64)
    made = orthonormal(torch.cat([column, 3 * column, torch.randn(20, 1, dtype=torch.float64)], dim=1))
    assert made[:, 1].abs().max() == 0
    assert made[:, 2].norm() == pytest.approx(1)
    assert orthonormal(torch.zeros(5, 2)).abs().max() == 0


def test_a_direction_that_found_nothing_begins_again():
    first = first_right_factor("w", 6, 2)
    summed = torch.stack([torch.zeros(6), torch.arange(6.0)], dim=1).double()
    following = next_right_factor(summed, first)
    assert torch.equal(following[:, 0], first[:, 0])
    torch.testing.assert_close(following[:, 1], unit_columns(summed)[:, 1])


def test_iterating_on_one_matrix_finds_its_best_approximation():
    """Warm start: the subspace iteration goes on from step to step."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(30, 6, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(12, 6, dtype=torch.float64))
    matrix = left @ torch.diag(torch.tensor([9.0, 6.0, 0.5, 0.3, 0.2, 0.1], dtype=torch.float64)) @ right.T
    first = factor = first_right_factor("w", 12, 2)
    for _ in range(20):
        columns = orthonormal(matrix @ factor)
        answer = matrix.T @ columns
        factor = next_right_factor(answer, first)
    best = torch.linalg.svdvals(matrix)[2:].square().sum().sqrt()
    assert (matrix - columns @ answer.T).norm() == pytest.approx(float(best), rel=1e-6)


@pytest.mark.parametrize(
    ("more", "can_undo"), [({}, False), ({"precision.name": "fp16"}, True), ({"sdc.every": 2}, True)]
)
def test_powersgd_keeps_its_errors_of_before_a_step_that_may_not_be_applied(more, can_undo):
    plan = tiny_plan({"dp": 2, "strategy.data.compression": "powersgd", **more})
    assert plan.data.exchange_form(plan).can_undo is can_undo


def test_every_compression_has_a_module_that_sends_and_no_other_is_registered():
    from parallelrun.base import registry
    from parallelrun.strategies.data.common.compression.plan import KINDS

    compressing = {kind for kind, one in KINDS.items() if one.compresses}
    assert compressing == set(registry.COMPRESSIONS)
    assert all(callable(registry.load("compressions", kind).sender) for kind in compressing)
