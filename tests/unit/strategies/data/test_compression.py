"""Compression before any rank runs: what is sent, what is refused, and the arithmetic of PowerSGD."""

from __future__ import annotations

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.planner.predict import prediction
from parallelrun.strategies.data.common.compression.powersgd import (
    first_right_factor,
    next_right_factor,
    orthonormal,
    unit_columns,
)
from tests.plans import tiny_plan

WAYS = ("ddp", "ring", "horovod")


def gradient_bytes(**overrides) -> int:
    plan = tiny_plan({"dp": 2, "strategy.data.bucket_mb": 0.01, **overrides})
    return sum(row.payload_bytes for row in prediction.collectives(plan, 0) if row.purpose == "gradients")


@pytest.mark.parametrize("kind", WAYS)
def test_fp16_halves_the_payload_exactly(kind):
    strategy = {"strategy.data.kind": kind}
    assert 2 * gradient_bytes(**strategy, **{"strategy.data.compression": "fp16"}) == gradient_bytes(**strategy)


@pytest.mark.parametrize("kind", WAYS)
def test_powersgd_sends_what_its_factors_hold(kind):
    """Per matrix of n x m at rank r: r (n + m) elements, where that is less; all else as it is."""
    rank, expected = 2, 0
    for parameter in tiny_plan(dp=2).spec.parameters.values():
        numel = torch.Size(parameter.shape).numel()
        if len(parameter.shape) == 2:
            rows, columns = parameter.shape
            numel = min(numel, rank * (rows + columns))
        expected += 4 * numel
    sent = gradient_bytes(
        **{"strategy.data.kind": kind, "strategy.data.compression": "powersgd", "strategy.data.powersgd_rank": rank}
    )
    assert sent == expected < gradient_bytes(**{"strategy.data.kind": kind}) / 2


def test_what_is_summed_again_after_dp_is_never_factored():
    """A tied weight in two stages: its copies' gradients are parts of one, which only a linear sum may be."""
    compressed = {"strategy.data.compression": "powersgd", "strategy.data.powersgd_rank": 1}
    spread = tiny_plan({"dp": 2, "pp": 2, "model.vocab": 256, "dataset.vocab": 256, **compressed})
    ((_, original),) = spread.tied_copies
    whole = 4 * torch.Size(spread.spec.parameters[original].shape).numel()
    assert gradient_bytes(**{"model.vocab": 256, "dataset.vocab": 256, **compressed}) < whole
    for rank in range(spread.world):
        rows = [row for row in prediction.collectives(spread, rank) if row.purpose == "gradients"]
        assert sum(row.payload_bytes for row in rows) > whole


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"strategy.data.compression": "zip"}, "is unknown"),
        ({"strategy.data.powersgd_rank": 2}, "powersgd_rank=2 is read by compression=powersgd only"),
        ({"strategy.data.compression": "powersgd", "strategy.data.powersgd_rank": 0}, "at least 1"),
        ({"strategy.data.compression": "powersgd", "precision.name": "fp16"}, "loss scale"),
    ],
)
def test_what_means_nothing_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        tiny_plan({"dp": 2, **overrides})


def test_other_ways_do_not_read_it():
    with pytest.raises(ConfigError, match=r"compression=fp16 is read by none"):
        from parallelrun.planner.resolve.resolve_config import resolve
        from tests.plans import tiny_config

        config = tiny_config({"dp": 2, "strategy.data.kind": "fsdp", "strategy.data.compression": "fp16"})
        resolve(config, given=frozenset({"strategy.data.compression"}))


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


def test_every_rank_starts_from_the_same_factor():
    assert torch.equal(first_right_factor("w", 6, 2), first_right_factor("w", 6, 2))
    assert not torch.equal(first_right_factor("w", 6, 2), first_right_factor("v", 6, 2))


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


def test_memory_counts_what_compression_keeps():
    """As many bytes as the runtime holds: halves; or messages, errors, and right factors three times."""
    from parallelrun.planner.contract.parameters import held_parameters
    from parallelrun.strategies.data.common.compression.fp16 import HalfSum
    from parallelrun.strategies.data.common.compression.powersgd import FactoredSum

    def weights(plan):
        return prediction.memory(plan, 0).weights

    plain = tiny_plan(dp=2)
    half = tiny_plan(dp=2, strategy__data__compression="fp16")
    buffer = torch.zeros(plain.spec.num_parameters)
    assert weights(half) - weights(plain) == HalfSum(buffer, lambda tensor: None)._half.nbytes
    factored = tiny_plan(dp=2, strategy__data__compression="powersgd", strategy__data__powersgd_rank=2)
    parts = [(held, torch.zeros(held.spec.shape)) for held in held_parameters(factored, 0)]
    few = [p for p in parts if factored.data.compression.is_factored(p[0], p[1].shape, factored)]
    many = [gradient for held, gradient in parts if all(held is not one for one, _ in few)]
    exchange = FactoredSum(many, few, 2, lambda tensor: None)
    kept = exchange._flat.nbytes + exchange._left.nbytes + exchange._right.nbytes
    kept += sum(stack.error.nbytes + 2 * stack.first.nbytes for stack in exchange.stacks)
    assert weights(factored) - weights(plain) == kept


def test_every_compression_has_a_module_that_sends_and_no_other_is_registered():
    from parallelrun.base import registry
    from parallelrun.strategies.data.common.compression.plan import KINDS

    compressing = {kind for kind, one in KINDS.items() if one.compresses}
    assert compressing == set(registry.COMPRESSIONS)
    assert all(callable(registry.load("compressions", kind).sender) for kind in compressing)
