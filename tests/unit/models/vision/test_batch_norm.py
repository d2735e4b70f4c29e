"""BatchNorm over sets: torch's own on each set, wherever its samples lie; running statistics move once a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallelrun.config.schema.run_schema import PrecisionConfig
from parallelrun.models.vision import batch_norm
from parallelrun.models.vision.batch_norm import BatchNorm, SampleSetLayout, SetPiece
from parallelrun.training.loop.build import Training, build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import measure, train_step
from tests.plans import tiny_config, tiny_plan
from tests.vision import RESNET

EPS = 1e-5


class Fixed(SampleSetLayout):
    """The sets of one rank that holds the whole batch."""

    def __init__(self, samples: int, size: int, spread: bool):
        self.size, self.spread, self.num_sets = size, spread, samples // size
        self.group: Any = type("Alone", (), {"size": 1, "index": 0})()
        self.pieces = batch_norm._pieces(0, samples, size)


def made(channels: int, sets: SampleSetLayout | None) -> BatchNorm:
    layer = BatchNorm(channels, EPS, 0.1, torch.float64).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.rand(channels, generator=generator) + 0.5)
    layer.sets = sets
    return layer


def torchs(x: Tensor, layer: BatchNorm, size: int) -> Tensor:
    """nn.BatchNorm2d on every set, with the layer's weights; its momentum of 1 keeps the last set's statistics."""
    outs, statistics = [], []
    for part in x.split(size):
        peer = nn.BatchNorm2d(x.size(1), EPS, momentum=1.0).double()
        peer.weight, peer.bias = layer.weight, layer.bias
        outs.append(peer(part))
        statistics.append(torch.stack((peer.running_mean, peer.running_var)))
    torchs.statistics = torch.stack(statistics).mean(0)  # type: ignore[attr-defined]
    return torch.cat(outs)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("size", [2, 4, 12])
def test_every_set_is_normalised_as_torch_does(size: int, spread: bool) -> None:
    x = torch.randn(12, 3, 4, 5, dtype=torch.float64) * 3 + 7
    upstream = torch.randn_like(x)
    layer = made(3, Fixed(12, size, spread))
    found, wanted = (t.clone().requires_grad_() for t in (x, x))
    out, expected = layer(found), torchs(wanted, layer, size)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out, (found, layer.weight, layer.bias), upstream)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (wanted, layer.weight, layer.bias), upstream))
    torch.testing.assert_close(layer.take_statistics(), torchs.statistics)  # type: ignore[attr-defined]
    assert layer.take_statistics() is None, "what was asked for is forgotten"


def test_a_second_backward_for_the_weights_alone_sends_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero bubble's: the first one is for the input alone."""
    calls: list[str] = []
    monkeypatch.setattr(batch_norm.comm, "all_reduce", lambda table, group, purpose: calls.append(purpose))
    layer, x = made(3, Fixed(4, 4, spread=True)), torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    out = layer(x * 1)
    upstream = torch.randn_like(out)
    torch.autograd.grad(out, x, upstream, retain_graph=True)
    found = torch.autograd.grad(out, (layer.weight, layer.bias), upstream)
    assert calls == [batch_norm.PURPOSE] * 2, "one exchange in forward, one in backward"
    torch.testing.assert_close(found, torch.autograd.grad(torchs(x, layer, 4), (layer.weight, layer.bias), upstream))


def test_a_large_mean_costs_no_digits() -> None:
    """A variance taken as a difference of fp32 second moments would be noise here."""
    x = torch.randn(8, 2, 4, 4) + 3000
    layer = BatchNorm(2, EPS, 0.1, torch.float32)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    layer.sets = Fixed(8, 8, spread=True)
    wide = x.double()
    exact = (wide - wide.mean((0, 2, 3), keepdim=True)) / wide.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(layer(x).double(), exact, atol=2e-3, rtol=0)


def test_linear_features_are_normalised_too() -> None:
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    for spread in (False, True):
        out = made(3, Fixed(6, 3, spread))(x)
        assert out.shape == x.shape
        torch.testing.assert_close(out[:3], torchs(x[:3, :, None, None], made(3, None), 3)[..., 0, 0])


def test_a_replica_knows_its_pieces_of_sets() -> None:
    assert batch_norm._pieces(6, 12, 8) == (SetPiece(0, 0, 2), SetPiece(1, 2, 6))
    assert batch_norm._pieces(0, 12, 4) == (SetPiece(0, 0, 4), SetPiece(1, 4, 8), SetPiece(2, 8, 12))
    assert batch_norm._pieces(12, 18, 24) == (SetPiece(0, 0, 6),)


def test_low_precision_is_normalised_in_fp32() -> None:
    x = torch.randn(8, 2, 3, 3).bfloat16()
    layer = BatchNorm(2, EPS, 0.1, torch.bfloat16)
    nn.init.ones_(layer.weight), nn.init.zeros_(layer.bias)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), nn.functional.batch_norm(x.float(), None, None, training=True), atol=0.02, rtol=0
    )


def training(**overrides: Any) -> Training:
    changes = {**RESNET, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return build(tiny_config(changes), tiny_plan(changes), torch.device("cpu"))


def running(one: Training) -> dict[str, Tensor]:
    return {parameter.name: parameter.tensor.detach().clone() for parameter in one.data.frozen}


def stepped(one: Training) -> dict[str, Tensor]:
    train_step(one, 1, 0.01, LossScaler(PrecisionConfig(), scaled=False))
    return running(one)


def test_running_statistics_move_once_a_step_by_the_mean_over_sets() -> None:
    one = training(model__norm_samples="4", model__norm_momentum=0.25)
    before = running(one)
    batch = one.reader.batch(1)
    after = stepped(one)
    fresh = training(model__norm_samples="4")  # the step has changed the weights
    x = fresh.model_parts[0].block("stem").convolution(batch.inputs)
    means = torch.stack([part.mean((0, 2, 3)) for part in x.split(4)]).mean(0)
    variances = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in x.split(4)]).mean(0)
    torch.testing.assert_close(after["stem.norm.running_mean"], 0.75 * before["stem.norm.running_mean"] + 0.25 * means)
    torch.testing.assert_close(
        after["stem.norm.running_var"], 0.75 * before["stem.norm.running_var"] + 0.25 * variances
    )


def test_recomputing_a_block_moves_them_no_further() -> None:
    plain = stepped(training(microbatches=2, model__norm_samples="4"))
    again = stepped(training(microbatches=2, model__norm_samples="4", recompute="full"))
    assert all(torch.allclose(plain[name], again[name], rtol=1e-6, atol=1e-7) for name in plain)


def test_a_step_that_is_not_applied_leaves_them_alone() -> None:
    one = training()
    before = running(one)
    with torch.no_grad():
        one.model_parts[0].get_parameter("head.classifier.weight").fill_(float("inf"))
    assert all(torch.equal(before[name], value) for name, value in stepped(one).items())
    assert all(
        module.take_statistics() is None for module in one.model_parts[0].modules() if isinstance(module, BatchNorm)
    )


def test_evaluation_uses_them_and_leaves_them_alone() -> None:
    one = training()
    before = running(one)
    first = measure(one)
    assert all(torch.equal(before[name], value) for name, value in running(one).items())
    with torch.no_grad():
        for parameter in one.data.frozen:
            parameter.tensor.add_(0.5)
    assert measure(one).loss != first.loss
