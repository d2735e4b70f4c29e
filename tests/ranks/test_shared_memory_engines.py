"""torch's own engines (DDP, DTensor, DCP, functional collectives) over both backends: equal bits.

FSDP2 and pipelining run in shared memory in every parity test, which compares them with one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.pool import run_ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def trained(wrapped: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Three steps; the parameters, whole."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in wrapped.parameters()]


def ddp(_: str) -> list[Tensor]:
    return trained(DistributedDataParallel(model(), bucket_cap_mb=0.001), batch())


def tensor_parallel(_: str) -> list[Tensor]:
    """Column then row parallel, with the sequence sharded outside: all-gather and reduce-scatter, functional."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first = ColwiseParallel(input_layouts=Shard(0))
    last = RowwiseParallel(output_layouts=Shard(0))
    return trained(parallelize_module(model(), mesh, {"0": first, "2": last}), batch())


def layouts(_: str) -> list[Tensor]:
    """DTensor's redistributions: all-gather, all-to-all, reduce-scatter, all-reduce, uneven."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(77.0).view(7, 11)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    summed = (sharded @ sharded.t()).sum().full_tensor()
    return [moved.to_local(), summed]


def checkpoint(folder: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = f"{folder}/{dist.get_backend()}"
    whole = torch.arange(30.0).view(10, 3)
    dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}, checkpoint_id=path)
    state = {"weight": distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert state["step"] == 3
    return [state["weight"].full_tensor()]


def functional_collectives(_: str) -> list[Tensor]:
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(4.0 * world) + rank
    found = [
        functional.all_reduce(tensor, "sum", group),
        functional.all_gather_tensor(tensor, 0, group),
        functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        functional.all_to_all_single(tensor, None, None, group),
        functional.broadcast(tensor, 1, group),
        *functional.all_reduce_coalesced([tensor, tensor[:2]], "max", group),
        *functional.all_gather_into_tensor_coalesced([tensor, tensor[:2]], group),
        *functional.reduce_scatter_tensor_coalesced([tensor, tensor], "sum", [0, 0], group),
    ]
    return [one.wait() if hasattr(one, "wait") else one for one in found]


def coalesced(_: str) -> list[Tensor]:
    tensors = [torch.full((3,), float(dist.get_rank() + number)) for number in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return tensors


ENGINES: dict[str, tuple[Callable[[str], list[Tensor]], int]] = {
    "DDP": (ddp, 2),
    "tensor parallel": (tensor_parallel, 2),
    "DTensor": (layouts, 3),
    "DCP": (checkpoint, 3),
    "functional": (functional_collectives, 2),
}


def close(a: Any, b: Any) -> bool:
    return all(len(x) == len(y) and all(map(torch.allclose, x, y)) for x, y in zip(a, b))


@pytest.mark.parametrize("name", ENGINES)
def test_engines_of_torch_train_alike_over_both_backends(name: str, tmp_path: Path) -> None:
    engine, world = ENGINES[name]
    shm = run_ranks(world, engine, str(tmp_path), backend="shm")
    gloo = run_ranks(world, engine, str(tmp_path), backend="gloo")
    assert shm[0] and close(shm, gloo)
    if world == 2 and name != "functional":  # a sum of two has one order
        assert all(torch.equal(x, y) for a, b in zip(shm, gloo) for x, y in zip(a, b))


def test_coalesced_calls() -> None:
    for tensors in run_ranks(2, coalesced, ""):
        assert [int(one[0]) for one in tensors] == [1, 3, 5]
