"""What a plan costs on a cluster: does it fit, how much does it compute, how long would it take. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from parallelrun.config.schema import ClusterConfig
from parallelrun.plan.account import EMBEDDING, WORLD, Traffic
from parallelrun.plan.structure import Memory, Plan


def fits(memory: Memory, cluster: ClusterConfig, device_bytes: int | None = None) -> str:
    """yes | no | unknown, against `cluster.memory_gb` (10^9 bytes) or the device's own size.

    Unknown without a size, and within the last tenth, where what the figure leaves out decides.
    """
    available = cluster.memory_gb * 1e9 if cluster.memory_gb else device_bytes
    if not available:
        return "unknown"
    if memory.total > available:
        return "no"
    return "yes" if memory.total <= 0.9 * available else "unknown"


@dataclass(frozen=True)
class Cost:
    """FLOPs of one step over all ranks, and seconds where the cluster gives rates (else None).

    model_flops: forward and twice that backward ("72-form": 72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for a gpt, SC21).
    hardware_flops: with the forwards that recompute=full repeats. compute_s: at the peak rate, bubble included.
    communication_s: of the busiest rank, its wire bytes and calls at the links' rates, nothing overlapped.
    """

    model_flops: float
    hardware_flops: float
    compute_s: float | None
    communication_s: float | None


def cost(plan: Plan, cluster: ClusterConfig, rows: tuple[Traffic, ...], makespan_flops: float) -> Cost:
    """rows: of `traffic`. makespan_flops: the length of the simulated step, in FLOPs of one rank."""
    forward = plan.spec.forward_flops * plan.batch.global_batch
    repeated = sum(block.forward_flops for block in plan.spec.blocks if block.is_recomputed)
    again = repeated * plan.batch.global_batch if plan.recompute == "full" else 0.0
    compute = makespan_flops / (cluster.peak_tflops * 1e12) if cluster.peak_tflops else None
    return Cost(3 * forward, 3 * forward + again, compute, _communication_s(plan, cluster, rows))


def _communication_s(plan: Plan, cluster: ClusterConfig, rows: tuple[Traffic, ...]) -> float | None:
    if not cluster.intra_gb_s:
        return None
    seconds = 0.0
    for row in rows:
        rate = cluster.intra_gb_s if stays_in_node(plan, cluster, row.axis) else cluster.inter_gb_s
        if row.calls and not rate:
            return None
        one_step = row.wire_bytes / ((rate or 1) * 1e9) + row.calls * (cluster.latency_us or 0.0) * 1e-6
        seconds += one_step / row.every
    return seconds


def stays_in_node(plan: Plan, cluster: ClusterConfig, axis: str) -> bool:
    """Do all groups of `axis` lie inside one host of `cluster.gpus_per_node` consecutive ranks?"""
    per_node = cluster.gpus_per_node or plan.world
    if plan.world <= per_node:
        return True
    if axis in (WORLD, EMBEDDING, "pp"):
        return False
    axis = axis if plan.data.group_size(axis) is None else "dp"
    span, inner = 1, 1  # ranks from a group's first to its last, for a group aligned to its span
    varying = {leaf for part in axis.split("+") for leaf in plan.mesh.leaf_axes(part)}
    for name, degree in reversed(plan.mesh.leaves):
        inner *= degree
        if name in varying and degree > 1:
            span = inner
    return span <= per_node and per_node % span == 0
