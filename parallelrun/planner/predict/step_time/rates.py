"""The rates of a cluster's devices and links, from the `cluster` keys. None of them depends on the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.precision import TABLE
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.cluster_cost import peak_flops

NEEDED = ("memory_gb_s", "intra_gb_s")
# Products in fp8 reach this part of what those in bf16 do of their peaks: 1,403 of 1,979 TFLOP/s to 794 of 989 on H100,
# 0.98 as much on B200 (ml-engineering, MAMF), 0.90 on MI300X and MI325X (AMD, Measuring Max-Achievable FLOPs, part 2).
OF_FP8 = 0.88


@dataclass(frozen=True)
class Rates:
    """Seconds, bytes a second and FLOP/s of one device.

    peak_flops: dense, in the plan's precision, of which fp8 is that of some products alone: `fp8` has their rates.
    product_efficiency: the part of it that a large product reaches; product_ramp: the inner size at which a product
    reaches half of that. multiprocessors: units that each compute one tile of a product at a time; 0: products are not
    cut into tiles. attention_efficiency: the part of the peak that fused attention reaches. memory_bytes_s: of the
    device's memory, as reached by simple kernels. kernel_s: from the end of a kernel to the begin of the next.
    operation_s: of the host, to issue one operation.

    intra_bytes_s, inter_bytes_s: of a device's link inside a node and between nodes, as reached by collectives.
    collective_s: of a collective, whatever it sends; hop_s, message_s: from one rank to the next inside a node, and
    between nodes. congestion: a port between n nodes has n ** -congestion of its rate. step_s: of a step, beside its
    blocks and bytes. synchronous: the host computes itself (CPU), so that the time to issue an operation adds to the
    operation's own. host_bytes_s: between a device and its host, one way; host_memory_bytes_s: a device's part of the
    host's memory.
    """

    peak_flops: float
    product_efficiency: float
    product_ramp: float
    multiprocessors: int
    attention_efficiency: float
    memory_bytes_s: float
    kernel_s: float
    operation_s: float
    intra_bytes_s: float
    inter_bytes_s: float | None
    collective_s: float
    hop_s: float
    message_s: float
    congestion: float = 0.0
    step_s: float = 0.0
    synchronous: bool = False
    host_bytes_s: float | None = None
    host_memory_bytes_s: float | None = None
    fp8: Rates | None = None


def rates_of(cluster: ClusterConfig, precision: str) -> Rates | None:
    """Return the rates of a cluster in a precision; None if it does not give what `missing` lists."""
    peak = peak_flops(cluster, precision)
    if missing(cluster, precision):
        return None
    assert peak and cluster.memory_gb_s and cluster.intra_gb_s
    share = cluster.link_efficiency
    if TABLE[precision].others and (rates := rates_of(cluster, TABLE[precision].others)):
        return replace(rates, fp8=replace(rates, peak_flops=peak, product_efficiency=OF_FP8 * rates.product_efficiency))
    return Rates(
        peak_flops=peak,
        product_efficiency=cluster.product_efficiency,
        product_ramp=cluster.product_ramp,
        multiprocessors=cluster.multiprocessors,
        attention_efficiency=cluster.attention_efficiency,
        memory_bytes_s=cluster.memory_gb_s * 1e9 * cluster.memory_efficiency,
        kernel_s=cluster.kernel_us * 1e-6,
        operation_s=cluster.operation_us * 1e-6,
        intra_bytes_s=cluster.intra_gb_s * 1e9 * share,
        inter_bytes_s=cluster.inter_gb_s * 1e9 * cluster.inter_efficiency if cluster.inter_gb_s else None,
        collective_s=cluster.collective_us * 1e-6,
        hop_s=cluster.hop_us * 1e-6,
        message_s=(cluster.latency_us or 0.0) * 1e-6,
        congestion=cluster.congestion,
        step_s=cluster.step_us * 1e-6,
        synchronous=bool(cluster.cores),
        host_bytes_s=cluster.host_gb_s * 1e9 * share if cluster.host_gb_s else None,
        host_memory_bytes_s=cluster.host_memory_gb_s * 1e9 * cluster.memory_efficiency
        if cluster.host_memory_gb_s
        else None,
    )


def missing(cluster: ClusterConfig, precision: str) -> tuple[str, ...]:
    """The `cluster` keys without which the time of a step is unknown."""
    needed = filter(None, (precision, TABLE[precision].others))
    peaks = (f"peak_tflops.{name}" for name in needed if not peak_flops(cluster, name))
    return (*peaks, *(key for key in NEEDED if not getattr(cluster, key)))


def absent(cluster: ClusterConfig, precision: str, world: int) -> tuple[str, ...]:
    """The `cluster` keys that are missing to predict plans on so many ranks."""
    crosses = world > (cluster.gpus_per_node or world)
    return (*missing(cluster, precision), *(("inter_gb_s",) if crosses and not cluster.inter_gb_s else ()))


def not_given(plan: Plan, cluster: ClusterConfig) -> str:
    """Return which keys are missing to predict the plan's time, as a clause; empty if none is."""
    keys = absent(cluster, plan.precision.name, plan.world)
    offloads = {"host_gb_s": plan.recompute == "offload" or plan.offloads_optimizer}
    offloads["host_memory_gb_s"] = plan.offloads_optimizer
    keys += tuple(key for key, is_read in offloads.items() if is_read and not (getattr(cluster, key) or cluster.cores))
    names = " and ".join(", ".join(f"cluster.{key}" for key in keys).rsplit(", ", 1))
    return f"{names} {'is' if len(keys) == 1 else 'are'} not given" if keys else ""
