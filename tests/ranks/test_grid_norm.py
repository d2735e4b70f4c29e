"""Norms of split features: the value and the gradients of torch's own on the whole rows, whatever their mean."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import comm
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import Group, build_mesh
from parallelrun.models import layers as single_device
from parallelrun.models import recompute
from parallelrun.models.gpt import network as gpt
from parallelrun.strategies.tensor.grid import norm
from tests.pool import run_ranks
from tests.tensor_cases import gpt_plan, values

SHAPE = (2, 3, 24)  # samples, sequence, features
EPS = 1e-5


def whole_norm(kind: str, dtype: torch.dtype, bias: bool) -> single_device.HiddenNorm:
    layer = single_device.HiddenNorm(kind, SHAPE[-1], EPS, bias, dtype)
    for name, parameter in layer.named_parameters():
        parameter.data = values(f"norm.{name}", tuple(parameter.shape)).to(dtype)
    return layer


def rows(mean: float, dtype: torch.dtype) -> Tensor:
    """Rows with a standard deviation of 0.2 about `mean`."""
    return (values("x", SHAPE) + mean).to(dtype)


def group_of_all() -> Group:
    world = dist.get_world_size()
    return Group("col", tuple(range(world)), dist.get_rank(), dist.group.WORLD)


def run(layer: single_device.HiddenNorm, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    found = {"y": y.detach(), "dx": x.grad}
    return found | {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}


def split_norm(kind: str, dtype: torch.dtype, bias: bool, mean: float, naive: bool = False) -> dict[str, Tensor]:
    """Body of a rank: this rank's part of everything. naive: with the variance that others compute."""
    if naive:
        norm._merge = naive_merge
    group, whole = group_of_all(), whole_norm(kind, dtype, bias)

    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(group.size, -1)[group.index].contiguous()

    for parameter in whole.parameters():
        parameter.data = part(parameter.data)
    layer = norm.GridNorm(whole, group=group)
    return run(layer, part(rows(mean, dtype)), part(values("gradient", SHAPE).to(dtype)))


def naive_merge(own: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """E[x^2] - E[x]^2, both in the dtype that comes."""
    mean, squares = own
    sums = torch.stack((mean * count, squares + mean.square() * count))
    comm.all_reduce(sums, group, "norm")
    mean, square = sums / (count * group.size)
    return mean, square - mean.square()


def whole_and_parts(
    world: int, kind: str, dtype: torch.dtype, bias: bool, mean: float, naive: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(fp64 on one device from the same rounded input, what the ranks found put together)."""
    alone = whole_norm(kind, dtype, bias).double()
    alone.compute_dtype = torch.float64
    expected = run(alone, rows(mean, dtype).double(), values("gradient", SHAPE).to(dtype).double())
    ranks = run_ranks(world, split_norm, kind, dtype, bias, mean, naive)
    return expected, {name: torch.cat([rank[name] for rank in ranks], -1) for name in expected}


def error(expected: Tensor, found: Tensor) -> float:
    return float((expected - found.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind, bias", [("layernorm", True), ("layernorm", False), ("rmsnorm", False)])
@pytest.mark.parametrize("world", [2, 3])
def test_value_and_gradients_are_those_of_whole_rows(world: int, kind: str, bias: bool) -> None:
    expected, found = whole_and_parts(world, kind, torch.float64, bias, mean=0.5)
    assert {name: error(expected[name], found[name]) for name in expected} == pytest.approx(
        dict.fromkeys(expected, 0.0), abs=1e-12
    )


def test_a_large_mean_costs_no_digits_where_the_naive_variance_loses_all() -> None:
    """fp32, mean 1e4, standard deviation 0.2: the variance is 1e-9 of the mean's square."""
    expected, found = whole_and_parts(2, "layernorm", torch.float32, True, mean=1e4)
    assert max(error(expected[name], found[name]) for name in expected) < 5e-3  # the mean itself rounds by 5e-4
    expected, found = whole_and_parts(2, "layernorm", torch.float32, True, mean=1e4, naive=True)
    assert not error(expected["y"], found["y"]) < 0.1  # nan counts as lost


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_half_precision_has_its_statistics_in_fp32(kind: str) -> None:
    expected, found = whole_and_parts(2, kind, torch.bfloat16, kind == "layernorm", mean=3.0)
    assert found["y"].dtype == found["dx"].dtype == torch.bfloat16
    assert error(expected["y"], found["y"]) < 2**-6 and error(expected["dx"], found["dx"]) < 2**-6


def calls(kind: str) -> list[tuple[str, str, str, int, int]]:
    """Body of a rank: what a forward and a backward pass send."""
    _, plan = gpt_plan({"tp": 2})
    mesh = build_mesh(plan, torch.device("cpu"))
    layer = norm.GridNorm(whole_norm(kind, torch.float32, False), group=mesh.group("tp"))
    layer.weight.data = layer.weight.data[: SHAPE[-1] // 2]
    x = rows(0.0, torch.float32)[..., : SHAPE[-1] // 2].requires_grad_()
    with CommunicationCounter(mesh) as counter:
        layer(x).sum().backward()
    return sorted((c.axis, c.operation, c.purpose, c.calls, c.payload_bytes) for c in counter.rows())


def test_one_small_collective_forward_and_one_backward() -> None:
    num_rows, fp32 = SHAPE[0] * SHAPE[1], 4
    assert run_ranks(2, calls, "layernorm")[0] == [
        ("tp", "all_gather", "norm", 1, 2 * 2 * num_rows * fp32),
        ("tp", "all_reduce", "norm", 1, 2 * num_rows * fp32),
    ]
    assert run_ranks(2, calls, "rmsnorm")[0] == [("tp", "all_reduce", "norm", 2, 2 * num_rows * fp32)]


def kept() -> list[tuple[int, ...]]:
    """Body of a rank: shapes of what autograd saves besides weights."""
    layer = norm.GridNorm(whole_norm("layernorm", torch.float32, True), group=group_of_all())
    for parameter in layer.parameters():
        parameter.data = parameter.data[: SHAPE[-1] // 2]
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    storages: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        held = layer(rows(0.0, torch.float32)[..., : SHAPE[-1] // 2].requires_grad_())
    assert held.requires_grad
    return sorted(tuple(saved.shape) for pointer, saved in storages.items() if pointer not in own)


def test_only_the_result_and_one_number_a_row_are_kept() -> None:
    assert run_ranks(2, kept)[0] == [(2, 3, 1), (2, 3, SHAPE[-1] // 2)]


def test_recompute_does_not_run_a_norm_again_that_sends() -> None:
    """selective sends no collective again: only norms that see whole rows are cheap."""
    config, plan = gpt_plan({})
    with torch.device("meta"):
        network = gpt.build(config, plan.spec, plan.precision)
    layer = network.block("layers.0")
    layer.mlp_norm = norm.GridNorm(layer.mlp_norm, group=Group("col", (0, 1), 0, None))
    recompute.apply(network, "selective")
    assert len(layer.attention_norm._forward_hooks) == 1 and not layer.mlp_norm._forward_hooks
