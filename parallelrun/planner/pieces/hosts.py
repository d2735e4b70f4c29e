"""The ranks that share a host of the cluster, and the communication rate of a group of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from math import gcd

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.caching import cached
from parallelrun.planner.contract.plan import EMBEDDING, WORLD, Plan


def ranks_per_node(cluster: ClusterConfig, world: int) -> int:
    """Devices of a host; if the cluster does not give them, the ranks are spread evenly over its nodes."""
    return cluster.gpus_per_node or -(-world // (cluster.nodes or 1))


def stays_in_node(plan: Plan, cluster: ClusterConfig, axis: str) -> bool:
    """Return whether every group of `axis` is inside a host of `cluster.gpus_per_node` consecutive ranks."""
    per_node = cluster.gpus_per_node or plan.world
    if plan.world <= per_node:
        return True
    if axis in (WORLD, EMBEDDING, "pp"):
        return False
    span, inner = 1, 1  # span: from the first to the last rank of a group that is aligned to it
    varying = mesh_dims(plan, axis)
    for name, degree in reversed(plan.mesh.mesh_dims):
        inner *= degree
        if name in varying and degree > 1:
            span = inner
    return span <= per_node and per_node % span == 0


def ranks_in_node(plan: Plan, cluster: ClusterConfig, axis: str) -> int:
    """The number of ranks of a group of `axis` that share a host, in the host with the fewest of them."""
    per_node = cluster.gpus_per_node or plan.world
    if axis in (WORLD, EMBEDDING):
        return min(per_node, plan.world) if axis == WORLD else 1
    return min(_shares(plan, axis, per_node))


@cached("weights_cache")
def _shares(plan: Plan, axis: str, per_node: int) -> Collection[int]:
    """The numbers of ranks of the first group of `axis` on its hosts; equal hosts of a large group only once."""
    varying, members, stride = mesh_dims(plan, axis), [0], 1
    for name, degree in reversed(plan.mesh.mesh_dims):
        if name in varying:
            period = per_node // gcd(stride, per_node)  # so many indices on, the same ranks of other hosts follow
            count = degree if degree % period else period
            members = [first + index * stride for index in range(count) for first in members]
        stride *= degree
    return Counter(member // per_node for member in members).values()


def backend_of_axis(plan: Plan, config: Config, axis: str) -> str:
    """Return what would carry the collectives of `axis`: nccl, shm or gloo.

    Assumes that the ranks of a host can map each other's memory; `parallelrun doctor` tests it.
    """
    if plan.device == "cuda":
        return "gloo" if axis == WORLD and plan.servers else "nccl"  # servers may have no GPU
    if config.backend == "gloo":
        return "gloo"
    cluster = replace(config.cluster, gpus_per_node=ranks_per_node(config.cluster, plan.world))
    return "shm" if stays_in_node(plan, cluster, axis) else "gloo"


def mesh_dims(plan: Plan, axis: str) -> set[str]:
    """The mesh dims over which the coordinates of a group of `axis` vary."""
    axis = axis if plan.data.group_size(axis) is None else plan.data_axis
    return {mesh_dim for part in axis.split("+") for mesh_dim in plan.mesh.mesh_dims_of(part)}


def rate_gb_s(plan: Plan, cluster: ClusterConfig, axis: str, point_to_point: bool) -> float | None:
    """GB/s of one rank in a group of `axis`; None if the cluster does not give the rates.

    A collective across hosts uses the ports of all its q ranks on a host: min(intra, q x inter). A point-to-point
    message uses the sender's port.
    """
    if stays_in_node(plan, cluster, axis):
        return cluster.intra_gb_s
    if not cluster.inter_gb_s or not cluster.intra_gb_s:
        return None
    ports = 1 if point_to_point else ranks_in_node(plan, cluster, axis)
    return min(cluster.intra_gb_s, ports * cluster.inter_gb_s)
