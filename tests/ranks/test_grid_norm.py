"""Norms of split features: the value and the gradients of torch's own on the whole rows, whatever their mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed.mesh import Group
from parallelrun.models import layers as single_device
from parallelrun.strategies.tensor.common import norm
from tests.pool import run_ranks

SHAPE = (2, 3, 24)  # samples, sequence, features
EPS = 1e-5


def values(seed: int, shape: tuple[int, ...], mean: float = 0.0) -> Tensor:
    """fp64 numbers with a standard deviation of 0.2 about `mean`."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * 0.2 + mean


def unsplit_norm(kind: str, dtype: torch.dtype, bias: bool) -> single_device.HiddenNorm:
    layer = single_device.HiddenNorm(kind, SHAPE[-1], EPS, bias, dtype)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = values(seed, tuple(parameter.shape), 1.0 - seed).to(dtype)
    return layer


def run(layer: single_device.HiddenNorm, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    gradients = {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


def split_norm(kind: str, dtype: torch.dtype, bias: bool, mean: float) -> dict[str, Tensor]:
    """Body of a rank: this rank's part of everything."""
    world = dist.get_world_size()
    group = Group("col", tuple(range(world)), dist.get_rank(), dist.group.WORLD)
    unsplit = unsplit_norm(kind, dtype, bias)

    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(group.size, -1)[group.index].contiguous()

    for parameter in unsplit.parameters():
        parameter.data = part(parameter.data)
    x, grad = values(2, SHAPE, mean).to(dtype), values(3, SHAPE).to(dtype)
    return run(norm.SplitNorm(unsplit, group=group), part(x), part(grad))


def errors(world: int, kind: str, dtype: torch.dtype, bias: bool, mean: float) -> dict[str, float]:
    """Of the joined parts, against fp64 on one device from the same rounded input."""
    alone = unsplit_norm(kind, dtype, bias).double()
    alone.compute_dtype = torch.float64
    expected = run(alone, values(2, SHAPE, mean).to(dtype).double(), values(3, SHAPE).to(dtype).double())
    ranks = run_ranks(world, split_norm, kind, dtype, bias, mean)
    assert all(rank[name].dtype == dtype for rank in ranks for name in expected)
    joined = {name: torch.cat([rank[name] for rank in ranks], -1).double() for name in expected}
    return {name: float((value - joined[name]).abs().max() / value.abs().max()) for name, value in expected.items()}


def test_a_large_mean_costs_no_digits() -> None:
    """fp32, mean 1e4, standard deviation 0.2: E[x^2] - E[x]^2 would lose all digits of the variance. The mean itself
    rounds by 5e-4."""
    assert max(errors(2, "layernorm", torch.float32, True, mean=1e4).values()) < 5e-3


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_half_precision_has_its_statistics_in_fp32(kind: str) -> None:
    found = errors(2, kind, torch.bfloat16, kind == "layernorm", mean=3.0)
    assert found["y"] < 2**-6 and found["dx"] < 2**-6
