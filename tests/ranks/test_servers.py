"""Process groups of a world with servers: the workers form the mesh, and the servers form their own group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import comm
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import build_mesh, build_server_group
from tests.plans import tiny_plan
from tests.pool import run_ranks

PS = {"strategy.name": "ps", "strategy.data.kind": "ps", "global_batch": 12}


def groups(overrides):
    plan = tiny_plan({**PS, **overrides})
    rank = dist.get_rank()
    tensor = torch.tensor([2.0**rank])
    if plan.role(rank) == "server":
        group = build_server_group(plan)
        assert group.axis == "servers" and group.ranks[group.index] == rank
        comm.all_reduce(tensor, group, "control")
        return tensor.item()
    mesh = build_mesh(plan, torch.device("cpu"))
    assert mesh.coordinate["dp"] == rank and mesh.group("dp").index == rank
    assert mesh.group("world").ranks == mesh.group("dp").ranks == tuple(range(plan.num_workers))
    assert mesh.group("tp").size == 1
    counter = CommunicationCounter(mesh)
    with counter:
        comm.all_reduce(tensor, mesh.group("dp"), "control")
        if mesh.group("dp").size > 1:
            dist.all_reduce(torch.zeros(1), group=mesh.group("world").process_group)  # unlabelled: named by its group
    return tensor.item(), [row.axis for row in counter.rows()]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"dp": 2, "servers": 1}, [(3.0, ["dp", "dp"])] * 2 + [4.0]),
        ({"dp": 2, "servers": 2}, [(3.0, ["dp", "dp"])] * 2 + [12.0] * 2),
        ({"dp": 1, "servers": 2}, [(1.0, [])] + [6.0] * 2),
    ],
)
def test_workers_and_servers_sum_among_themselves(overrides, expected):
    assert run_ranks(len(expected), groups, overrides) == expected


def too_small_a_world():
    with pytest.raises(ValueError, match="has 2 ranks beside 1 server, the world has 2"):
        build_mesh(tiny_plan({**PS, "dp": 2}), torch.device("cpu"))
    return True


def test_servers_are_counted_in_the_world():
    assert all(run_ranks(2, too_small_a_world))
