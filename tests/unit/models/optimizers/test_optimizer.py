"""The optimizer on local tensors: what decays, state by one-device name, exact continuation."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from parallelrun.base.errors import ConfigError
from parallelrun.base.layout import Layout
from parallelrun.config.schema.run_schema import OptimizerConfig
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.optimizers import OPTIMIZERS
from parallelrun.planner.contract.parameters import LocalParameter
from parallelrun.planner.model.model_spec import Initialiser, ParameterSpec

ELEMENTWISE = [name for name, kind in OPTIMIZERS.items() if kind.elementwise]
SHAPES = {"layer.weight": (4, 3), "layer.bias": (4,), "norm.weight": (3,)}
EXPERTS = {"experts.up": (2, 4, 3), "experts.up_bias": (2, 4)}


def make(shapes: dict[str, tuple[int, ...]] = SHAPES, rows: int | None = None) -> list[LocalParameter]:
    """Parameters of ones, of which this rank holds the first `rows` rows (None: all)."""
    found = []
    for name, shape in shapes.items():
        spec = ParameterSpec(name, shape, Initialiser("ones"), "expert" if name in EXPERTS else "row_parallel")
        tensor = torch.ones(shape, dtype=torch.float64)[: shape[0] if rows is None else rows]
        found.append(LocalParameter(name, tensor, spec, Layout.replicated(len(shape))))
    return found


def gradients(parameters: list[LocalParameter], seed: int) -> None:
    for parameter in parameters:
        whole = torch.randn(parameter.spec.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        parameter.tensor.grad = whole[: parameter.tensor.shape[0]].clone()


def test_only_logical_matrices_decay():
    parameters = make(SHAPES | EXPERTS)
    for parameter in parameters:
        parameter.tensor.grad = torch.zeros_like(parameter.tensor)
    Optimizer(OptimizerConfig(name="sgd", weight_decay=0.5), parameters).step(0.1)
    decayed = {p.name for p in parameters if float(p.tensor.flatten()[0]) == pytest.approx(1 - 0.1 * 0.5)}
    assert decayed == {"layer.weight", "experts.up"}
    assert all(p.tensor.eq(1).all() for p in parameters if p.name not in decayed)


@pytest.mark.parametrize(
    ("name", "reference"),
    [("adamw", partial(torch.optim.AdamW, betas=(0.8, 0.9))), ("adagrad", partial(torch.optim.Adagrad, foreach=False))],
)
def test_updates_are_those_of_torch_with_decay_of_matrices_only(name, reference):
    ours, theirs = make(), make()
    decay = [{"params": [theirs[0].tensor], "weight_decay": 0.2}, {"params": [p.tensor for p in theirs[1:]]}]
    expected = reference(decay, lr=0.05, eps=1e-4, weight_decay=0.0)
    optimizer = Optimizer(OptimizerConfig(name=name, betas=[0.8, 0.9], eps=1e-4, weight_decay=0.2), ours)
    for step in range(3):
        gradients(ours, step), gradients(theirs, step)
        optimizer.step(0.05)
        expected.step()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.tensor, b.tensor, rtol=1e-12, atol=1e-12)


def test_lion_follows_the_sign_of_its_interpolated_momentum():
    """Algorithm 2 of Chen et al. 2023, in plain words."""
    ours = make()
    weight, average = ours[0].tensor.clone(), torch.zeros_like(ours[0].tensor)
    optimizer = Optimizer(OptimizerConfig(name="lion", betas=[0.9, 0.99], weight_decay=0.2), ours)
    for step in range(3):
        gradients(ours, step)
        optimizer.step(0.05)
        weight -= 0.05 * (torch.sign(0.9 * average + 0.1 * ours[0].tensor.grad) + 0.2 * weight)
        average = 0.99 * average + 0.01 * ours[0].tensor.grad
    torch.testing.assert_close(ours[0].tensor, weight, rtol=1e-12, atol=1e-12)


def test_the_state_of_every_optimizer_is_as_large_as_the_plan_says():
    for name in ELEMENTWISE:
        kind = OPTIMIZERS[name]
        for momentum in (0.0, 0.9):
            config, parameters = OptimizerConfig(name=name, momentum=momentum), make()
            optimizer = Optimizer(config, parameters)
            gradients(parameters, 0)
            optimizer.step(0.1)
            for parameter in parameters:
                kept = sum(value.numel() for value in optimizer.state(parameter.name).values() if value.dim())
                assert kept == kind.num_states(config) * parameter.tensor.numel(), (name, momentum)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_shard_is_updated_as_its_part_of_the_whole_an_empty_one_too(name):
    whole, part, empty = make(), make(rows=2), make(rows=0)
    for parameters in (whole, part, empty):
        optimizer = Optimizer(OptimizerConfig(name=name, momentum=0.9), parameters)
        for step in range(2):
            gradients(parameters, step)
            optimizer.step(0.1)
    for a, b in zip(whole, part):
        torch.testing.assert_close(a.tensor[:2], b.tensor, rtol=1e-14, atol=0)
    assert all(p.tensor.numel() == 0 for p in empty)


def test_the_rate_is_the_one_given_at_each_step():
    parameters = make()
    optimizer = Optimizer(OptimizerConfig(name="sgd", lr=100.0, weight_decay=0.0), parameters)
    for rate in (0.1, 0.01):
        for parameter in parameters:
            parameter.tensor.grad = torch.ones_like(parameter.tensor)
        optimizer.step(rate)
    assert float(parameters[1].tensor[0]) == pytest.approx(1 - 0.11)


@pytest.mark.parametrize(
    "name, momentum, keys",
    [
        ("adamw", 0.0, {"step", "exp_avg", "exp_avg_sq"}),
        ("sgd", 0.9, {"momentum_buffer"}),
        ("sgd", 0.0, set()),
        ("adagrad", 0.0, {"sum", "step"}),
        ("lion", 0.0, {"exp_avg"}),
    ],
)
def test_state_by_name_continues_bit_for_bit(name, momentum, keys):
    config = OptimizerConfig(name=name, momentum=momentum)
    straight = make()
    optimizer = Optimizer(config, straight)
    assert not any(value.any() for value in optimizer.state("layer.weight").values()), "nothing before the first step"
    gradients(straight, 0)
    optimizer.step(0.1)
    resumed = make()
    for parameter, source in zip(resumed, straight):
        parameter.tensor.copy_(source.tensor)
    other = Optimizer(config, resumed)
    for parameter in resumed:
        saved = {key: value.clone() for key, value in optimizer.state(parameter.name).items()}
        assert set(saved) == keys
        other.load_state(parameter.name, saved)
    for parameters, one in ((straight, optimizer), (resumed, other)):
        gradients(parameters, 1)
        one.step(0.1)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(straight, resumed))


def test_an_unknown_optimizer_is_a_config_error():
    with pytest.raises(ConfigError, match="sophia"):
        Optimizer(OptimizerConfig(name="sophia"), make())
