"""Checkpoints of independent data replicas (local SGD, DiLoCo), whose weights and optimizer state differ.

Under the one-device names lies the mean over replicas, which any other plan loads: the model that averaging now would
give. Beside it, under `replica/<r>of<n>/`, lies what each replica holds, which the same number of replicas loads, so
that resuming is exact between two synchronisations too.
"""

from __future__ import annotations

from dataclasses import replace

from parallelrun import comm
from parallelrun.checkpoint.index import Index, replica_key
from parallelrun.checkpoint.planners import LocalPart
from parallelrun.mesh import Mesh
from parallelrun.plan.structure import Plan

PURPOSE = "checkpoint"


def are_apart(plan: Plan) -> bool:
    """Are there several replicas, each with weights of its own?"""
    return plan.data.independent and plan.mesh.size("dp") > 1


def apart_and_mean(parts: list[LocalPart], mesh: Mesh) -> list[LocalPart]:
    """This replica's parts under its own names, and on the first replica the mean of all under the plain ones.

    Collective over dp: replicas have the same parts in the same order.
    """
    group = mesh.group("dp")
    out = [replace(part, key=replica_key(group.index, group.size, part.key)) for part in parts]
    for part in parts:
        mean = part.tensor.detach().to(mesh.device, copy=True)
        if mean.numel():
            comm.all_reduce(mean, group, PURPOSE)
        mean /= group.size
        if group.index == 0:
            out.append(replace(part, tensor=mean.to(part.tensor.device)))
    return out


def of_this_one(part: LocalPart, index: Index, plan: Plan, mesh: Mesh) -> LocalPart:
    """The part as this replica is to load it: its own where the checkpoint has as many replicas, else the mean."""
    if not are_apart(plan):
        return part
    group = mesh.group("dp")
    own = replica_key(group.index, group.size, part.key)
    return replace(part, key=own) if own in index.tensors else part
