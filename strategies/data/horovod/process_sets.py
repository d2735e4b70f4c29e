"""Process sets: workers that average among themselves (Horovod's static process sets). Others train alone."""

from __future__ import annotations

from itertools import product

import torch.distributed as dist

from parallelrun.mesh import Group, Mesh
from parallelrun.plan.structure import Plan

from .plan import Horovod


def make_group(strategy: Horovod, plan: Plan, mesh: Mesh) -> Group:
    """This rank's process set along dp; all of dp where there are no sets.

    Every rank makes every set's group, in the same order: by the other axes' coordinates, then by the set.
    """
    everyone = mesh.group("dp")
    if not strategy.process_sets:
        return everyone
    mine: Group | None = None
    others = [(mesh_dim, degree) for mesh_dim, degree in plan.mesh.mesh_dims if mesh_dim != "dp"]
    for place in product(*(range(degree) for _, degree in others)):
        coordinate = dict(zip([mesh_dim for mesh_dim, _ in others], place))
        for members in strategy.process_sets:
            ranks = tuple(plan.mesh.rank(**coordinate, dp=worker) for worker in members)
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if mesh.rank in ranks:
                mine = Group(strategy.axis(members[0]), ranks, ranks.index(mesh.rank), made)
    assert mine is not None, "every worker belongs to a set"
    return mine
