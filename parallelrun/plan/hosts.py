"""Which ranks share a host of the cluster. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import ClusterConfig


def ranks_per_node(cluster: ClusterConfig, world: int) -> int:
    """Devices a host has, as far as the cluster says; else all ranks are on one host."""
    return cluster.gpus_per_node or -(-world // (cluster.nodes or 1))
