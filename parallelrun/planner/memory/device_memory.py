"""GPU memory beside the tensors of a step: the CUDA context, communicators and the allocator's unused blocks.

Nothing of it can be counted on CPU, so it is computed from constants of the cluster, which are 0 where ranks run on
CPUs.
"""

from __future__ import annotations

from dataclasses import replace

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.plan import Plan

GIGA = 10**9


def num_communicators(plan: Plan, pp_rank: int) -> int:
    """Process groups of several ranks that a worker of `pp_rank` is in (see `parallelrun.distributed.mesh.build_mesh`).

    Each has buffers of its own from its first collective on. A mesh dim that spans the world shares the world's group.
    """
    mesh, ranks = plan.mesh, plan.num_workers
    if ranks == 1:
        return 0
    dims = sum(1 < degree < ranks for _, degree in mesh.mesh_dims)
    flattened = sum(sum(mesh.size(part) > 1 for part in parts) > 1 for _, parts in mesh.flattened)
    holds_copy = bool(plan.tied_copies) and pp_rank in (plan.stages[0].pp_rank, plan.last_stage_pp_rank)
    return 1 + dims + flattened + holds_copy


def on_device(memory: Memory, plan: Plan, pp_rank: int, cluster: ClusterConfig) -> Memory:
    """`memory` with the context, communicators and allocator of a device of the cluster."""
    return beside(memory, num_communicators(plan, pp_rank), cluster)


def beside(memory: Memory, communicators: int, cluster: ClusterConfig) -> Memory:
    """`memory` with what a device of the cluster holds besides, for so many communicators."""
    context = cluster.context_gb + communicators * cluster.communicator_gb
    slack = round(memory.total * cluster.allocator_slack)
    left_out = memory.leaves_out[2:] if context else memory.leaves_out
    return replace(memory, context=round(context * GIGA), slack=slack, leaves_out=left_out)
