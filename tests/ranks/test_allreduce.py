"""All-reduce written out: the sum, the same bits everywhere, in order, with what it sends counted to the byte."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelrun.mesh.runtime import Group
from parallelrun.strategies.data.allreduce.runtime import all_reduce
from tests.pool import run_ranks


def world_group() -> Group:
    world, rank = dist.get_world_size(), dist.get_rank()
    return Group("dp", tuple(range(world)), rank, dist.group.WORLD)


def summed(algorithm, group_size, numels, dtype):
    group = world_group()
    out = []
    for numel in numels:
        generator = torch.Generator().manual_seed(group.index)
        tensor = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
        all_reduce(tensor, group, "gradients", algorithm, group_size=group_size)
        out.append(tensor)
    return out


NUMELS = (0, 1, 2, 5, 7, 64, 1000, 300_001)


@pytest.mark.parametrize(
    ("world", "algorithm", "group_size"),
    [(n, a, 1) for n in (2, 3, 4, 5) for a in ("ring", "halving_doubling")]
    + [(4, "hierarchical", 2), (6, "hierarchical", 3), (6, "hierarchical", 2)],
)
def test_sum(world, algorithm, group_size):
    results = run_ranks(world, summed, algorithm, group_size, NUMELS, torch.float64)
    for i, numel in enumerate(NUMELS):
        expected = sum(
            torch.randn(numel, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(world)
        )
        for rank in range(world):
            assert torch.equal(results[rank][i], results[0][i])
        assert torch.allclose(results[0][i], expected, rtol=0, atol=1e-13)
