"""Whoever waits in shared memory is woken, once, by the member that comes last."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed.shared_memory import engine, process
from tests.pool import run_ranks

NUM_CALLS = 50


def woken() -> dict[str, float]:
    """The doorbells that each kind of collective rings, per call. A process that is not woken sleeps for minutes."""
    rank, world, write = dist.get_rank(), dist.get_world_size(), os.write
    small, large = torch.ones(256), torch.ones(40_000)
    parts = list(large.view(world, -1).clone())
    kinds: dict[str, tuple[bool, Callable[[], object]]] = {
        "at once": (False, lambda: dist.all_reduce(small)),
        "by parts": (False, lambda: dist.all_reduce(large)),
        "by the last": (True, lambda: dist.all_reduce(large)),
        "barrier": (True, dist.barrier),
        "broadcast": (True, lambda: dist.broadcast(small, 3)),
        "reduce": (True, lambda: dist.reduce(small, 2)),
        "gather": (True, lambda: dist.gather(parts[rank], parts if rank == 1 else None, 1)),
        "scatter": (True, lambda: dist.scatter(small, [small] * world if rank == 1 else None, 1)),
        "all-gather": (True, lambda: dist.all_gather_into_tensor(large, parts[rank])),
        "reduce-scatter": (True, lambda: dist.reduce_scatter_tensor(parts[rank], large)),
        "all-to-all": (True, lambda: dist.all_to_all_single(large, large.clone())),
        "messages": (True, partial(in_a_ring, small)),
    }
    rung, found = [0], {}

    def count(descriptor: int, data: bytes) -> int:
        rung[0] += 1
        return write(descriptor, data)

    engine.SLEEP_S = 300.0
    dist.barrier()
    for kind, (dist.group.WORLD._make.shares_cores, call) in kinds.items():
        process.os = SimpleNamespace(**{**vars(os), "write": count})
        before = rung[0]
        for _ in range(NUM_CALLS):
            call()
        process.os = os
        total = torch.tensor([rung[0] - before])
        dist.all_reduce(total)
        found[kind] = int(total) / NUM_CALLS
    return found


def in_a_ring(tensor: Tensor) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    received = dist.irecv(tensor.clone(), (rank - 1) % world)
    dist.send(tensor, (rank + 1) % world)
    received.wait()


def test_whoever_waits_is_woken_and_by_one_member_only() -> None:
    """A second ring per member is possible if two members post at the same moment; it is rare."""
    world = 8
    for found in run_ranks(world, woken, fresh=True):
        for kind, rings in found.items():
            most = {"by parts": 2 * (world - 1), "reduce": 1, "messages": world}
            assert rings <= 1.2 * most.get(kind, world - 1), kind
