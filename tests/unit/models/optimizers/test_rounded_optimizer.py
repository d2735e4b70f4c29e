"""Weights in bf16 alone: updates that are rounded at random, alike under every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.base.layout import Layout
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.models.optimizers.rounded_optimizer import RoundedOptimizer
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.predict import prediction
from tests.plans import tiny_config, tiny_plan
from tests.unit.models.optimizers.test_optimizer import make

ROUNDED = {"precision.name": "bf16", "optimizer.rounding": "stochastic"}
CONFIG = tiny_config(optimizer__eps=1e-4).optimizer
LR = 2.0**-13  # AdamW's first update; an eighth of the distance from 1 to the next number below


def stored(shapes: dict[str, tuple[int, ...]]) -> list[LocalParameter]:
    return [replace(p, tensor=torch.ones(p.spec.shape, dtype=torch.bfloat16)) for p in make(shapes)]


def optimizer_of(parameters: list[LocalParameter], tp: int = 1, rank: int = 0) -> RoundedOptimizer:
    plan = tiny_plan(ROUNDED, tp=tp)
    return RoundedOptimizer(CONFIG, parameters, plan, Mesh(plan.mesh, rank, torch.device("cpu")))


def updated(parameters: list[LocalParameter], steps: int = 1, **where: int) -> RoundedOptimizer:
    optimizer = optimizer_of(parameters, **where)
    for _ in range(steps):
        for parameter in parameters:
            parameter.tensor.grad = torch.ones_like(parameter.tensor)
        optimizer.step(LR)
    return optimizer


def test_a_weight_moves_as_often_as_the_update_is_a_part_of_its_last_bit():
    """Rounded to nearest, it would never move. The state is that of the same training in fp32."""
    (weight,), (exact,) = stored({"layer.bias": (20_000,)}), make({"layer.bias": (20_000,)})
    optimizer = updated([weight], steps=2)
    reference = Optimizer(CONFIG, [exact])
    for _ in range(2):
        exact.tensor.grad = torch.ones_like(exact.tensor)
        reference.step(LR)
    moved = (1 - weight.tensor.double()).mean() / (1 - exact.tensor).mean()
    assert moved == pytest.approx(1, abs=0.05) and set(weight.tensor.unique().tolist()) == {1, 1 - 2**-8, 1 - 2**-7}
    state = optimizer.state(weight.name)
    assert state["exp_avg_sq"].dtype == torch.float32 and weight.tensor.dtype == torch.bfloat16
    assert torch.allclose(state["exp_avg"].double(), reference.state(weight.name)["exp_avg"], rtol=1e-6)
    assert sum(t.untyped_storage().nbytes() for t in optimizer._tensors.values()) == 0, "no copies between updates"


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_are_rounded_as_the_logical_tensor_is(dim):
    shapes = {"experts.up": (4, 6, 32)} if dim == 2 else {"layer.weight": (64, 32), "experts.up_bias": (8, 64)}
    whole = stored(shapes)
    updated(whole)
    for rank in range(2):
        layouts = [Layout(tuple(("tp",) if i == dim else () for i in range(len(p.spec.shape)))) for p in whole]
        parts = [
            replace(p, layout=layout, tensor=torch.ones_like(p.tensor.chunk(2, dim)[rank].contiguous()))
            for p, layout in zip(whole, layouts)
        ]
        updated(parts, tp=2, rank=rank)
        for part, logical in zip(parts, whole):
            assert torch.equal(part.tensor, logical.tensor.chunk(2, dim)[rank]) and len(part.tensor.unique()) == 2


def test_steps_and_tensors_are_rounded_by_bits_of_their_own_and_a_resumed_run_by_the_same():
    first, second = stored({"layer.weight": (64, 32), "other.weight": (64, 32)})
    through = updated([first, second], steps=1)
    after = [first.tensor.clone(), second.tensor.clone()]
    assert not torch.equal(*after)
    resumed = [replace(p, tensor=p.tensor.clone()) for p in (first, second)]
    again = optimizer_of(resumed)
    for parameter in resumed:
        again.load_state(parameter.name, {k: v.clone() for k, v in through.state(parameter.name).items()})
    for optimizer, parameters in ((through, [first, second]), (again, resumed)):
        for parameter in parameters:
            parameter.tensor.grad = torch.ones_like(parameter.tensor)
        optimizer.step(LR)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip((first, second), resumed))
    moved = [before != parameter.tensor for before, parameter in zip(after, (first, second))]
    assert not torch.equal(after[0] == after[0].max(), ~moved[0])


def test_a_rank_holds_half_of_the_weights_and_no_more_state():
    wide, narrow = (prediction.memory(tiny_plan(ROUNDED | {"optimizer.rounding": value}), 0)
                    for value in ("none", "stochastic"))  # fmt: skip
    assert (2 * narrow.weights, narrow.optimizer) == (wide.weights, wide.optimizer)


@pytest.mark.parametrize(
    "overrides",
    [
        {"precision.name": "fp32"}, {"optimizer.name": "sgd"}, {"optimizer.name": "muon"}, {"optimizer.offload": True},
        {"dp": 2, "strategy.data.kind": "local_sgd"}, {"dp": 2, "servers": 1, "strategy.data.kind": "ps"},
        {"model.name": "resnet", "dataset.name": "digits", "model.vocab": 10},
        {"model.experts": 4, "model.router.bias_rate": 0.1},
    ],
    ids=str,
)  # fmt: skip
def test_what_more_than_an_update_changes_needs_weights_in_fp32(overrides):
    tiny_plan(overrides)
    with pytest.raises(ConfigError, match=r"optimizer.rounding needs bf16"):
        tiny_plan({**ROUNDED, **overrides})
