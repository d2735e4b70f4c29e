"""Products in float8: how operands are rounded, both kernels, and a training beside the same in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelrun.distributed import torch_private
from parallelrun.models import float8
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import llama, tiny_config

KINDS = {float8.OPERAND: (3, -9), float8.GRADIENT: (2, -16)}  # stored bits, exponent of the smallest number


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_are_rounded_to_nearest_by_a_power_of_2_at_which_the_largest_fits(kind, dtype):
    matrix = (torch.randn(64, 48) * torch.randn(64, 48).mul(4).exp2() * 1e-3).to(dtype)
    rounded = float8.quantise(matrix, kind)
    bits, smallest = KINDS[kind]
    assert torch.frexp(rounded.scale).mantissa == 0.5
    assert 0.49 < float(matrix.abs().max() / rounded.scale) / torch.finfo(kind).max <= 1
    error = (rounded.widened() - matrix).abs().float()
    assert (error <= matrix.abs() * 2.0 ** -(bits + 1) + rounded.scale * 2.0 ** (smallest - 1)).all()
    halved = float8.quantise(matrix[:, :24], kind)  # a shard's own scale
    same = halved.widened() == rounded.widened()[:, :24]
    assert same[matrix[:, :24].abs() > rounded.scale * torch.finfo(kind).tiny].all()


@pytest.mark.parametrize("kind", [float8.FUSED, float8.SPLIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_and_weights_keep_three_bits_and_gradients_two(kind, dtype):
    """1.125 has three bits behind the point, 1.0625 four."""
    for number, forward, backward in ((1.125, 1.125, 1.0), (1.0625, 1.0, 1.0)):
        x, weight = torch.eye(16, dtype=dtype).mul_(number), torch.eye(16, dtype=dtype)
        (y,) = float8.multiply(x.requires_grad_(), [(weight.requires_grad_(), None)], dtype, kind)
        y.backward(torch.full_like(y, number))
        assert y.diagonal().eq(forward).all() and x.grad.eq(backward).all()
        assert weight.grad.eq(backward * forward).all()


def test_zeros_have_a_scale_and_what_is_undefined_stays_so():
    assert float8.quantise(torch.zeros(2, 3)).widened().eq(0).all()
    assert float8.quantise(torch.full((2, 2), 1e-44)).widened().isfinite().all()
    for bad in (torch.inf, torch.nan):
        rounded = float8.quantise(torch.tensor([[1.0, bad]]))
        assert not (rounded @ float8.quantise(torch.ones(2, 1))).isfinite().any()


def test_in_fp64_the_significand_is_that_of_float8_without_bounds():
    matrix = torch.randn(40, 40, dtype=torch.float64)
    matrix *= (matrix.abs() > 2**-5) & (matrix.abs() < 2**8)
    for kind in KINDS:
        assert (float8.quantise(matrix, kind).widened() == matrix.float().to(kind).double()).all()
    assert (float8.quantise(1e-40 * matrix).widened() != 0).eq(matrix != 0).all()


@pytest.mark.parametrize("kind", [float8.FUSED, float8.SPLIT])
def test_the_devices_kernel_and_the_emulation_give_the_same_numbers(kind, monkeypatch):
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 32, 48, requires_grad=True)
        pairs: Any = [(torch.randn(n, 48, requires_grad=True), torch.randn(n, requires_grad=True)) for n in (16, 64)]
        out = float8.multiply(x, pairs, torch.float32, kind)
        loss = sum((y * torch.randn_like(y)).sum() for y in out)
        return [*out, *torch.autograd.grad(loss, [x, *(part for pair in pairs for part in pair)])]

    emulated = gradients()
    monkeypatch.setattr(torch_private, "has_scaled_product", lambda left, right: True)
    for ours, theirs in zip(emulated, gradients(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def losses(precision: str) -> list[float]:
    config = tiny_config(llama(model__layers=1, precision__name=precision, optimizer__lr=0.02, steps=5))
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    return [train_step(training, step, 0.02, scaler).loss for step in range(1, 6)]


def test_a_training_in_fp8_is_close_to_the_same_in_bf16():
    bf16, fp8 = losses("bf16"), losses("fp8")
    assert fp8 != bf16 and bf16[-1] < 0.95 * bf16[0]
    assert fp8 == pytest.approx(bf16, rel=0.02)
