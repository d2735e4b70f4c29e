"""Muon on one device: torch's own updates, and which parameters it updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.distributed import torch_private
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.optimizers import muon
from parallelrun.models.optimizers.optimizer import OffloadedOptimizer, Optimizer
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.optimizers import muon_matrices, num_states
from parallelrun.planner.contract.parameters import LocalParameter, held_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.orthogonalising import MOMENTUM, collectives, exchanges
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.matrices import orthogonalising_s
from parallelrun.planner.predict.step_time.spread import OPTIMIZER
from parallelrun.planner.predict.step_time.step import StepModel
from tests.plans import llama, tiny_config, tiny_plan
from tests.unit.planner.predict.step_time.test_step_time import CLUSTER, RATES
from tests.vision import RESNET, VGG

MUON = {"optimizer.name": "muon", "optimizer.momentum": 0.9, "model.layers": 1}


def parameters_of(plan: Plan, seed: int) -> list[LocalParameter]:
    """Every parameter with random values, which `seed` decides."""
    generator = torch.Generator().manual_seed(seed)
    return [
        LocalParameter(p.name, torch.randn(p.spec.shape, generator=generator), p.spec, p.layout)
        for p in held_parameters(plan, 0)
    ]


@pytest.mark.parametrize(("factor", "kind"), [("match_rms_adamw", Optimizer), ("original", OffloadedOptimizer)])
def test_updates_are_those_of_torch_bit_for_bit(factor, kind):
    """In bf16, in which torch.optim.Muon always multiplies: tall, wide and square matrices. The others are AdamW's."""
    overrides = {**MUON, **llama(), "precision.name": "bf16", "optimizer.adjust_lr_fn": factor, "optimizer.eps": 1e-4}
    plan, config = tiny_plan(overrides), tiny_config(overrides).optimizer
    ours, theirs = parameters_of(plan, 0), parameters_of(plan, 0)
    matrices = [p.tensor for p in theirs if p.spec.name in muon_matrices(plan)]
    tables = [p.tensor for p in theirs if len(p.spec.shape) == 2 and p.spec.name not in muon_matrices(plan)]
    vectors = [p.tensor for p in theirs if len(p.spec.shape) == 1]
    assert (len(matrices), len(tables), len(vectors)) == (7, 2, 3)
    others = [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    expected = (
        torch_private.uncompiled(torch.optim.Muon)(
            matrices, lr=0.05, weight_decay=0.1, momentum=0.9, adjust_lr_fn=factor
        ),
        torch_private.uncompiled(torch.optim.AdamW)(others, lr=0.05, betas=(0.9, 0.95), eps=1e-4, fused=True),
    )
    optimizer = kind(config, ours, plan, Mesh(plan.mesh, 0, torch.device("cpu")))
    for step in range(3):
        for a, b, gradient in zip(ours, theirs, parameters_of(plan, step + 1)):
            a.tensor.grad, b.tensor.grad = gradient.tensor, gradient.tensor
        optimizer.step(0.05)
        for update in expected:
            update.step()
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(ours, theirs))
    for parameter in ours:
        stored = sum(value.numel() for value in optimizer.state(parameter.name).values() if value.dim())
        assert stored == num_states(parameter.spec, plan) * parameter.tensor.numel()


def test_newton_schulz_of_fp64_is_that_of_torch_but_for_its_rounding():
    matrix = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    result = muon.orthogonalise(matrix.clone())
    singular = (left.T @ result @ right.T).diagonal()
    assert torch.allclose(left @ singular.diag() @ right, result, atol=1e-12)  # the singular vectors stay
    assert 0.65 < singular.min() <= singular.max() < 1.25


EXPERTS = {"model.experts": 2, "model.expert_period": 1}
MODELS = {
    "experts": ({**EXPERTS, "model.expert_bias": True}, {"router", "up", "down"}, {"embedding", "bias"}),
    "images": (RESNET, {"convolution1", "stem"}, {"classifier", "norm"}),
    "linear layers behind images": ({**VGG, "tp": 2}, {"convolution", "fc2"}, {"fc3", "bias"}),
    "bert": ({"model.name": "bert"}, {"transform", "down"}, {"embedding", "bias"}),
}


@pytest.mark.parametrize(("overrides", "inside", "outside"), MODELS.values(), ids=MODELS)
def test_hidden_matrices_are_orthogonalised_and_nothing_else(overrides, inside, outside):
    names = muon_matrices(tiny_plan({**MUON, **overrides}))
    assert all(any(part in name for name in names) for part in inside), sorted(names)
    assert not any(part in name for name in names for part in outside), sorted(names)


def work_of(overrides: dict[str, object]) -> torch.Tensor:
    """The FLOPs and seconds of all matrices of one rank."""
    plan = tiny_plan({**MUON, "model.hidden": 4096, **overrides})
    (exchange,) = exchanges(plan, 0)
    return torch.tensor([sum(k.flops * n for k, n in exchange.owned({})), orthogonalising_s(plan, CLUSTER, RATES)])


def test_an_expert_is_a_matrix_of_its_own():
    assert muon.rate_factor("original", (4, 18, 2)) == muon.rate_factor("original", (18, 2)) == 3
    dense, two, six = (work_of(more) for more in ({}, EXPERTS, {**EXPERTS, "model.experts": 6}))
    torch.testing.assert_close(six - two, 4 * (two - dense), rtol=0.02, atol=0)  # but for routers
    torch.testing.assert_close(work_of({"model.layers": 3}), 3 * dense)


def test_axes_that_share_a_dim_are_gathered_from_the_last():
    (exchange,) = exchanges(tiny_plan({**MUON, "dp": 2, "tp": 2, "strategy.data.kind": "zero1"}), 0)
    assert exchange.axes == ("dp", "tp")  # of rows, dp splits what tp has split


def test_the_first_rank_owns_most_and_all_own_nearly_as_much():
    plan = tiny_plan({**MUON, "model.layers": 6, "dp": 5, "global_batch": 10, "strategy.data.kind": "zero1"})
    (exchange,) = exchanges(plan, 0)
    work = [sum(kind.flops * count for kind, count in exchange.owned({"dp": rank})) for rank in range(5)]
    largest = max(matrix.kind.flops for matrix in exchange.matrices)
    assert work == sorted(work, reverse=True) and work[0] - work[-1] <= largest


def test_servers_that_hold_pieces_of_matrices_are_refused():
    with pytest.raises(ConfigError, match="optimizer=muon updates complete matrices"):
        tiny_plan({**MUON, "dp": 2, "strategy.data.kind": "ps", "servers": 1})


def test_zero1_divides_the_work_that_ddp_repeats_and_sends_little_for_it():
    """A block's matrices have 12 x hidden^2 weights. Each of two owners sends half of them there, and half back."""
    settings = {**MUON, "dp": 2, "precision.name": "bf16", "model.hidden": 2048, "model.heads": 8}
    ddp, zero1 = (tiny_plan({**settings, "strategy.data.kind": kind}) for kind in ("ddp", "zero1"))
    (row,) = collectives(zero1, zero1.mesh.coordinate(0))
    assert row == Collective("dp", "all_to_all", MOMENTUM, 2, 2 * (6 + 6) * 2048**2)
    assert not collectives(ddp, ddp.mesh.coordinate(0))
    repeated, divided = (orthogonalising_s(plan, CLUSTER, RATES) for plan in (ddp, zero1))
    assert divided == pytest.approx(repeated / 2 + collective_s(row, zero1, CLUSTER, RATES))
    steps = [StepModel(CLUSTER).step_time(plan) for plan in (ddp, replace(ddp, optimizer="adamw"))]
    assert steps[0].parts[OPTIMIZER] == pytest.approx(repeated + steps[1].parts[OPTIMIZER], rel=0.05)
