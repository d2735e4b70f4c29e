"""The process groups of a plan's mesh. All ranks create the same groups in the same order; degree 1 needs none.

Parameter servers are not part of the mesh, but every rank must take part in creating a group: workers call
`build_mesh`, and servers call `build_server_group` at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelrun.base.wording import counted
from parallelrun.distributed.turns import Turns
from parallelrun.planner.contract.mesh_shape import MeshShape
from parallelrun.planner.contract.plan import DATA_CONTEXT, EMBEDDING, WORLD, Plan
from parallelrun.planner.pieces import context_axes, expert_axes

SERVERS = "servers"


@dataclass(frozen=True)
class Group:
    """The ranks whose coordinates differ from this rank's only in `axis`. process_group is None for a single rank."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mesh:
    """This rank's coordinate in the plan's mesh, and its groups. turns: of its passes that overlap."""

    def __init__(self, shape: MeshShape, rank: int, device: torch.device):
        self.shape = shape
        self.rank = rank
        self.coordinate = shape.coordinate(rank)
        self.device = device
        self.turns = Turns(device)
        self._groups: dict[str, Group] = {}

    def group(self, axis: str) -> Group:
        """Return the group of a (flattened) mesh dim, of `world` (all workers) or `embedding` (first, last stage)."""
        if axis in self._groups:
            return self._groups[axis]
        assert self.shape.size(axis) == 1, f"axis {axis!r} of {self.shape} has no group"
        return Group(axis, (self.rank,), 0, None)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Return torch's DeviceMesh over axes of degree > 1, major first, for FSDP2.

        It consists of existing groups, because torch's mesh does not contain flattened dims (dp over ep and others).
        """
        groups = [self.group(axis) for axis in axes]
        process_groups = [group.process_group for group in groups if group.process_group is not None]
        assert len(process_groups) == len(axes), f"not every axis of {axes} has several ranks"
        ranks = torch.tensor(self.shape.group_of(self.rank, *axes)).view([group.size for group in groups])
        of_all = process_groups if len(axes) > 1 else process_groups[0]
        return DeviceMesh.from_group(of_all, self.device.type, mesh=ranks, mesh_dim_names=axes)

    @property
    def axis_of_group(self) -> dict[str, str]:
        """The axis of each process group, by the group's name.

        An axis that spans the world shares the world's group. If several axes share a group, the others take precedence
        over axes of experts and of cp, and these over dp where gradients are summed over dp x cp. Calls with a
        `comm.label` do not need this.
        """
        of_experts_first = sorted(self._groups, key=self._precedence, reverse=True)
        groups = [(axis, self._groups[axis]) for axis in of_experts_first]
        named = {str(g.process_group.group_name): axis for axis, g in groups if g.process_group is not None}
        world = self._groups.get(WORLD)
        if world and world.process_group is not None:
            spanning = [a for a, g in self._groups.items() if g.ranks == world.ranks and a not in (WORLD, EMBEDDING)]
            first = min(spanning, key=self._precedence, default=WORLD)
            named[str(world.process_group.group_name)] = first
        return named

    def _precedence(self, axis: str) -> int:
        """Calls without a label in a group that several axes share belong to the one with the lowest number."""
        if axis == "dp" and DATA_CONTEXT in self._groups:
            return 2
        return int(expert_axes.is_of_experts(axis) or context_axes.is_of_context(axis))


def build_mesh(plan: Plan, device: torch.device) -> Mesh:
    """Create every group of the plan, on its workers. If plan.world > 1, the default process group must exist.

    Raises ValueError if the mesh does not cover exactly the worker ranks (torch silently accepts a smaller mesh).
    """
    rank = dist.get_rank() if plan.world > 1 else 0
    world = dist.get_world_size() if plan.world > 1 else 1
    if plan.mesh.num_ranks + plan.servers != world:
        beside = f" beside {counted(plan.servers, 'server')}" if plan.servers else ""
        raise ValueError(
            f"the mesh {plan.mesh.mesh_dims} has {plan.mesh.num_ranks} ranks{beside}, the world has {world}"
        )
    mesh = Mesh(plan.mesh, rank, device)
    if plan.servers:
        mesh._groups |= {axis: group for axis, group in _groups_beside_servers(plan).items() if group.size > 1}
        return mesh
    if world == 1:
        return mesh
    everyone = tuple(range(world))
    mesh._groups[WORLD] = Group(WORLD, everyone, rank, dist.group.WORLD)
    mesh_dims = [(axis, degree) for axis, degree in plan.mesh.mesh_dims if degree > 1]
    root = init_device_mesh(
        device.type, tuple(degree for _, degree in mesh_dims), mesh_dim_names=tuple(axis for axis, _ in mesh_dims)
    )
    for axis, _ in mesh_dims:
        ranks = plan.mesh.group_of(rank, axis)
        mesh._groups[axis] = Group(axis, ranks, ranks.index(rank), root.get_group(axis))
    for axis, parts in plan.mesh.flattened:
        several = [part for part in parts if plan.mesh.size(part) > 1]
        if len(several) == 1:  # all other parts have degree 1, so the flattened dim has the group of this one
            only = mesh._groups[several[0]]
            mesh._groups[axis] = Group(axis, only.ranks, only.index, only.process_group)
        elif several:
            _enumerate(mesh, axis, list(plan.mesh.groups(axis)))
    if plan.tied_copies:
        _enumerate(mesh, EMBEDDING, embedding_groups(plan))
    return mesh


def build_server_group(plan: Plan) -> Group:
    """Return the group of all servers; create the same groups as the workers in `build_mesh`."""
    assert plan.role(dist.get_rank()) == "server", f"rank {dist.get_rank()} is a worker"
    return _groups_beside_servers(plan)[SERVERS]


def _groups_beside_servers(plan: Plan) -> dict[str, Group]:
    """Return this rank's groups in a world with servers, by axis: every rank takes part in creating all of them.

    Axes with the same groups share them, but for the embedding group, as in a world without servers.
    """
    rank, shape = dist.get_rank(), plan.mesh
    axes = dict.fromkeys((*shape.mesh_dim_names, *(axis for axis, _ in shape.flattened), plan.worker_ranks))
    groups_of = {WORLD: [tuple(range(plan.num_workers))], SERVERS: [tuple(range(plan.num_workers, plan.world))]}
    groups_of |= {axis: list(shape.groups(*axis.split("+"))) for axis in axes if axis}
    groups_of |= {EMBEDDING: embedding_groups(plan)} if plan.tied_copies else {}
    created: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}
    own = {}
    for axis, groups in groups_of.items():
        has_gpus = axis != SERVERS and plan.device == "cuda"
        backend = "cpu:gloo,cuda:nccl" if has_gpus else None  # None: as the world's
        for ranks in groups:
            key = axis == EMBEDDING, ranks
            if len(ranks) > 1 and key not in created:
                created[key] = dist.new_group(list(ranks), backend=backend)
            if rank in ranks:
                own[axis] = Group(axis, ranks, ranks.index(rank), created.get(key))
    return own


def embedding_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return pairs of ranks with the copies of a tied weight: first and last stage, otherwise same coordinate."""
    first, last = plan.stages[0].pp_rank, plan.stages[-1].pp_rank
    return [tuple(sorted((ranks[first], ranks[last]))) for ranks in plan.mesh.groups("pp")]


def _enumerate(mesh: Mesh, axis: str, groups: list[tuple[int, ...]]) -> None:
    """Create all groups of an axis, on every rank in the same order; keep the group of this rank."""
    for ranks in groups:
        process_group = dist.new_group(list(ranks))
        if mesh.rank in ranks:
            mesh._groups[axis] = Group(axis, ranks, ranks.index(mesh.rank), process_group)
