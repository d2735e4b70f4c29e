"""What layers with experts do once a step, in one process: weight of the auxiliary loss, counts, selection biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallelrun.models.moe.layer import MoE
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.router_step import bias_change
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import finish_gradients, forward_backward, measure, train_step
from tests.plans import tiny_config

EXPERTS: dict[str, Any] = {
    "model.experts": 4, "model.router.capacity_factor": 0.5, "model.router.min_capacity": 1, "precision.name": "fp64",
    "model.router.bias_rate": 0.125,
}  # fmt: skip
LAYERS = ["layers.1.moe", "layers.3.moe"]
ASSIGNED = 8 * 8 * 2  # samples x seq x top_k


def built(**overrides: Any) -> Training:
    config = tiny_config({**EXPERTS, **{key.replace("__", "."): value for key, value in overrides.items()}})
    return build(config, resolve(config), torch.device("cpu"))


def stepped(training: Training, step: int = 1) -> list[dict[str, Any]]:
    train_step(training, step, 0.01, LossScaler(training.config.precision, scaled=False))
    return training.routing.described()


def numbers(layer: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in layer.items() if isinstance(value, float)}


def biases(training: Training) -> dict[str, Tensor]:
    return {p.name: p.tensor.detach().clone() for p in training.data.frozen}


def test_a_bias_moves_towards_the_mean_load_and_biases_do_not_drift() -> None:
    change = bias_change(torch.tensor([9.0, 1.0, 1.0, 1.0], dtype=torch.float64), 0.25)
    assert change.tolist() == [-0.375, 0.125, 0.125, 0.125]
    assert bias_change(torch.tensor([5.0, 5.0]), 0.25).tolist() == [0.0, 0.0]
    assert bias_change(torch.tensor([3.0, 2.0, 1.0]), 0.25).tolist() == [-0.25, 0.0, 0.25]


def test_every_layer_is_described_in_order() -> None:
    layers = stepped(built())
    assert [layer["layer"] for layer in layers] == LAYERS
    for layer in layers:
        assert sum(layer["load"]) == ASSIGNED and 0 < sum(layer["kept"]) < ASSIGNED
        assert layer["all_to_all_bytes"] == 0 and layer["aux"] > 0


def test_a_step_moves_the_biases_by_the_load_it_saw() -> None:
    training = built()
    assert all(not bias.any() for bias in biases(training).values())
    layers = stepped(training)
    for layer in layers:
        expected = bias_change(torch.tensor(layer["load"], dtype=torch.float64), 0.125)
        assert expected.any() and torch.equal(biases(training)[f"{layer['layer']}.router.selection_bias"], expected)


def test_a_step_that_was_not_applied_moves_nothing_and_is_still_seen() -> None:
    training = built()
    forward_backward(training, 1)
    training.routing.finish_step(applied=False)
    assert all(not bias.any() for bias in biases(training).values())
    assert sum(training.routing.described()[0]["load"]) == ASSIGNED


@pytest.mark.parametrize("overrides", [{"recompute": "full"}, {"recompute": "selective"}, {"microbatches": 4},
                                       {"recompute": "full", "microbatches": 2}], ids=str)  # fmt: skip
def test_counts_are_those_of_one_forward_pass_over_the_batch(overrides: dict[str, Any]) -> None:
    """A recomputed router sees its tokens twice: torchtitan halves its counts for that."""
    plain, other = built(), built(**overrides)
    for step in (1, 2):
        expected = stepped(plain, step)
        for layer, said in zip(stepped(other, step), expected, strict=True):
            assert layer["load"] == said["load"] and layer["kept"] == said["kept"] and layer["overflow"] > 0
            assert numbers(layer) == pytest.approx(numbers(said), rel=1e-12)


def test_evaluation_is_not_counted() -> None:
    training, other = built(), built()
    stepped(training)
    stepped(other)
    before, held = training.routing.described(), biases(training)
    measure(training)
    assert training.routing.described() == before
    assert all(torch.equal(bias, held[name]) for name, bias in biases(training).items())
    assert stepped(training, 2) == stepped(other, 2)


def test_a_forward_pass_outside_of_a_step_is_not_counted() -> None:
    training = built()
    batch = training.reader.batch(1)
    training.model_parts[0](batch.inputs, batch.sample_ids)
    assert sum(stepped(training)[0]["load"]) == ASSIGNED


def gradients(training: Training, loss_scale: float) -> dict[str, Tensor]:
    """As a step has them, but for the update."""
    forward_backward(training, 1, loss_scale)
    finish_gradients(training)
    training.routing.finish_step(applied=False)
    return {p.name: p.tensor.grad.clone() for p in training.parameters if p.tensor.grad is not None}


@pytest.mark.parametrize("overrides", [{}, {"microbatches": 4}, {"model.router.group_samples": 2}], ids=str)
@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_the_auxiliary_loss_is_a_mean_over_the_groups_of_the_global_batch(
    overrides: dict[str, Any], loss_scale: float
) -> None:
    """Against one loss of the whole batch, written plainly: cross-entropy per target plus the mean over groups."""
    aux = {"model.router.aux_coefficient": 0.7, "model.router.z_coefficient": 0.1}
    training, plain = built(**aux, **overrides), built(**aux, **{**overrides, "microbatches": 1})
    found = gradients(training, loss_scale)
    (part,) = plain.model_parts
    routings: list[Any] = []
    for module in part.modules():
        if isinstance(module, MoE):
            assert module.auxiliary_scale == 0.0  # before any step
            module.router.register_forward_hook(lambda _, __, routing: routings.append(routing))
    batch = plain.reader.batch(1)
    loss = part.loss(part(batch.inputs, batch.sample_ids), batch.targets) / batch.targets.numel()
    groups = 8 // overrides.get("model.router.group_samples", 1)
    assert all(routing.num_groups == groups for routing in routings) and len(routings) == 2
    total = loss + sum(routing.auxiliary for routing in routings) / groups
    (loss_scale * total).backward()
    without = built(**{**aux, "model.router.aux_coefficient": 0.0, "model.router.z_coefficient": 0.0}, **overrides)
    matters = gradients(without, loss_scale)
    for parameter in plain.parameters:
        name = parameter.name
        torch.testing.assert_close(found[name], parameter.tensor.grad, rtol=1e-9, atol=1e-13, msg=lambda text: text)
        if name.endswith("router.weight"):
            assert not torch.allclose(found[name], matters[name], rtol=1e-3)


def test_a_model_without_experts_has_none_of_it() -> None:
    training = built(model__experts=0, **{"model.router.bias_rate": 0.0, "model.router.capacity_factor": None})
    assert stepped(training) == [] and training.routing.collect().numel() == 0
