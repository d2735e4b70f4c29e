"""Body of a rank: collectives of groups that overlap, in any order."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.distributed import shared_memory
from parallelrun.distributed.shared_memory.work import SharedMemoryWork


def out_of_order(seed: int) -> None:
    """Groups that overlap; what is issued is waited for in another order on every rank, or not at all."""
    rank = dist.get_rank()
    groups = [dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2, 3), (0, 2), (0, 1, 2, 3))]
    ranks_of = [dist.get_process_group_ranks(one) if one != dist.GroupMember.NON_GROUP_MEMBER else [] for one in groups]
    order, local = random.Random(seed), random.Random(seed + rank)
    pending: list[tuple[Any, Tensor, float]] = []
    for number in range(200):
        which, numel = order.randrange(4), order.choice([1, 100, 20_000])
        if rank in ranks_of[which]:
            tensor = torch.full((numel,), float(rank + number))
            work = dist.all_reduce(tensor, group=groups[which], async_op=True)
            pending.append((work, tensor, float(sum(ranks_of[which]) + number * len(ranks_of[which]))))
        if pending and local.random() < 0.3:
            work, tensor, expected = pending.pop(local.randrange(len(pending)))
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, expected)), (number, tensor[0], expected)
    local.shuffle(pending)
    for work, tensor, expected in pending[: len(pending) // 2]:
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    dist.barrier()
    shared_memory.finish()
    for work, tensor, expected in pending[len(pending) // 2 :]:
        if not isinstance(work, SharedMemoryWork):
            work.wait()  # of gloo's: its own threads advance it, maybe not to the end yet
        assert work.is_completed() and work.is_success() and torch.equal(tensor, torch.full_like(tensor, expected))
