"""Groups of a mesh with ep: every named view of the one world reaches its own members, and is counted by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelrun.distributed import comm
from parallelrun.distributed.comm.counter import CommunicationCounter
from parallelrun.distributed.mesh import build_mesh
from tests.plans import tiny_plan
from tests.pool import run_ranks

MOE = {"model.experts": 8, "strategy.data.kind": "ddp"}
HSDP = {"strategy.data.kind": "fsdp", "strategy.data.shard": 2}
CASES = {
    "part of dp": {"dp": 4, "ep": 2},
    "all of dp": {"dp": 4, "ep": 4},
    "beside tp": {"dp": 2, "ep": 2, "tp": 2},
    "beside stages": {"dp": 2, "ep": 2, "pp": 2},
    "two levels": {"dp": 4, "ep": 4, "strategy.expert.group_size": 2},
    "inside shards": {"dp": 4, "ep": 2, **HSDP},
    "no ep": {"dp": 4},
}


def members_by_axis(overrides: dict[str, Any]) -> dict[str, tuple[list[int], list[int], str | None]]:
    """By axis: who added to a sum over it, who should have, and what an unlabelled call over it is counted as."""
    plan = tiny_plan({**MOE, **overrides})
    mesh, found = build_mesh(plan, torch.device("cpu")), {}
    for axis in (*plan.mesh.mesh_dim_names, *(axis for axis, _ in plan.mesh.flattened), "world"):
        group = mesh.group(axis)
        mine = torch.zeros(4)
        mine[mesh.rank] = 1.0
        comm.all_reduce(mine, group, "test")
        counted = None
        if group.process_group is not None:
            with CommunicationCounter(mesh) as counter:
                dist.all_reduce(torch.zeros(1), group=group.process_group)
            counted = counter.rows()[0].axis
        shape = plan.mesh.group_of(mesh.rank, axis) if axis != "world" else range(4)
        found[axis] = (mine.nonzero().flatten().tolist(), list(shape), counted)
        assert list(group.ranks) == list(shape) and group.ranks[group.index] == mesh.rank
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_axis_reaches_its_own_members(name: str) -> None:
    for found in run_ranks(4, members_by_axis, CASES[name]):
        assert all(reached == members for reached, members, _ in found.values())


def test_engines_send_over_the_axis_of_all_parameters_where_two_share_a_group() -> None:
    """torch's engines are counted by group name; what experts send is labelled."""
    whole = run_ranks(4, members_by_axis, CASES["all of dp"])[0]
    assert whole["dp"][2] == whole["ep"][2] == "dp"
    shards = run_ranks(4, members_by_axis, CASES["inside shards"])[0]
    assert shards["dp_shard"][2] == "dp_shard" and shards["dp_replicate"][2] == shards["expert_dp"][2] == "dp_replicate"
    part = run_ranks(4, members_by_axis, CASES["part of dp"])[0]
    assert [part[axis][2] for axis in ("dp", "expert_dp", "ep")] == ["dp", "expert_dp", "ep"]
