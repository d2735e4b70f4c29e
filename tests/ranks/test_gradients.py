"""Final gradients on ranks: partial axes, tied copies, a norm that counts once, overflow that all ranks skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.matrix import shared
from tests.pool import run_ranks
from tests.ranks.data_body import start

EXPERTS = {"model.experts": 4, "model.expert_period": 2}
WORLDS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "dp x tp x pp": {"dp": 2, "tp": 2, "pp": 2},
    "copies of kv heads": {"tp": 4, "model.kv_heads": 2},
    "zero1": {"dp": 2, "tp": 2, "strategy.data.kind": "zero1"},
    "fsdp": {"dp": 4, "strategy.data.kind": "fsdp"},
    "hsdp x tp": {"dp": 4, "tp": 2, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
    "experts": {**EXPERTS, "dp": 4, "ep": 2},
    "experts without copies": {**EXPERTS, "dp": 2, "ep": 2},
    "experts x tp": {**EXPERTS, "dp": 2, "ep": 2, "tp": 2},
    "experts, zero1": {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "zero1"},
    "experts, hsdp": {**EXPERTS, "dp": 4, "ep": 2, "strategy.data.kind": "fsdp", "strategy.data.shard": 2},
}


def fill_with_ones(overrides: dict[str, Any]) -> tuple[float, int]:
    """(this rank's share of the squared norm, elements of the model) with all gradients 1."""
    training = start(overrides)
    training.data.begin_step()
    training.data.finish_gradients()
    for parameter in training.parameters:
        parameter.tensor.grad.fill_(1.0)  # in the data strategy's flat buffers, where it has such
    share = training.gradients.squared_norm()
    assert share.dtype == torch.float64 and share.dim() == 0
    return float(share), training.plan.spec.num_parameters


@pytest.mark.parametrize("case", shared(WORLDS))
def test_every_logical_element_is_counted_once_over_the_world(case):
    overrides = WORLDS[case]
    world = overrides.get("dp", 1) * overrides.get("tp", 1) * overrides.get("pp", 1)
    shares = run_ranks(world, fill_with_ones, overrides)
    assert sum(share for share, _ in shares) == pytest.approx(shares[0][1], rel=1e-12)
    if case == "dp":
        assert shares[0][0] == pytest.approx(shares[1][0], abs=world), "replicas do not share the work"


def overflow(overrides: dict[str, Any], bad_rank: int) -> tuple[bool, bool, float, bool]:
    """(applied, weights unchanged, scale after, a later step is applied) when one rank's gradient overflows.

    Under ddp before it is summed: after that all copies are alike, and every rank measures its own.
    """
    training = start({**overrides, "precision.name": "fp16", "precision.loss_scale": 1024.0})
    scaler = LossScaler(training.config.precision, training.plan.precision.scaled)
    before = [p.tensor.clone() for p in training.parameters]

    if training.mesh.rank == bad_rank and training.plan.data.kind == "ddp":
        weight = training.parameters[0].tensor
        handle = weight.register_hook(lambda gradient: gradient.fill_(float("inf")))

    def poison(trained: Any) -> None:
        if trained.mesh.rank != bad_rank:
            return
        if trained.plan.data.kind == "ddp":
            handle.remove()
        else:
            next(p for p in trained.parameters if p.tensor.numel()).tensor.grad.view(-1)[0] = float("inf")

    result = train_step(training, 1, 0.1, scaler, observe=poison)
    scaler.update(result.applied)
    unchanged = all(torch.equal(a, p.tensor) for a, p in zip(before, training.parameters))
    return result.applied, unchanged, scaler.scale, train_step(training, 2, 0.1, scaler).applied


@pytest.mark.parametrize("overrides", [{}, {"strategy.data.kind": "zero1"}, {"strategy.data.kind": "fsdp"}], ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(overrides):
    # Copies are the same on all ranks, and each measures a part of them: the first parameters fall to the last rank.
    assert run_ranks(2, overflow, {"dp": 2, **overrides}, 1) == [(False, True, 512.0, True)] * 2


def scaled_norm(overrides: dict[str, Any], scale: float) -> tuple[float, float]:
    """(norm reported, largest gradient element at the update) of one step at a loss scale."""
    training = start({**overrides, "precision.name": "fp16", "precision.loss_scale": scale, "optimizer.clip": 0.01})
    seen = []
    step = training.optimizer.step
    training.optimizer.step = lambda lr, around=None: (
        seen.append(max(float(p.tensor.grad.abs().max()) for p in training.parameters)),
        step(lr),
    )
    result = train_step(training, 1, 0.1, LossScaler(training.config.precision, True))
    return result.grad_norm, seen[0]


def test_the_loss_scale_is_gone_before_clipping_and_update():
    (norm, largest), (norm_scaled, largest_scaled) = (
        run_ranks(2, scaled_norm, {"dp": 2}, s)[0] for s in (64.0, 4096.0)
    )
    assert norm_scaled == pytest.approx(norm, rel=2e-2)
    assert largest_scaled == pytest.approx(largest, rel=2e-2)
    assert largest < 0.01
