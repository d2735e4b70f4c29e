"""The cost of a plan on a cluster: whether it fits, its FLOPs and its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from parallelrun.base.wording import gib
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.memory import Memory
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.pieces.hosts import rate_gb_s
from parallelrun.planner.predict.traffic import TrafficRow

POINT_TO_POINT = ("send", "recv", "all_to_all")  # each rank sends data that no other one has
DAY = 86400.0  # seconds
# The part of a GPU's peak rate that full training runs reach, with recomputation counted as work: the median of the ten
# models of 1.7 B to 1 T parameters in table 1 of Narayanan et al. (SC21), which reach 43 % to 52 % of an A100's peak.
SUSTAINED = 0.455
SURE = 0.9  # of a device's memory, where the cluster does not say what a GPU holds beside tensors: the rest is for that


def fits(memory: Memory, cluster: ClusterConfig) -> str:
    """yes | no | unknown: unknown without a memory size, and where the allocator or uncounted memory decides."""
    available = (cluster.memory_gb or 0) * 1e9
    if available and memory.total - memory.slack > available:
        return "no"
    return "yes" if memory.total <= available * (1 if memory.context else SURE) else "unknown"


def why_fits(memory: Memory, cluster: ClusterConfig) -> str:
    """The reason for the result of `fits`."""
    if not cluster.memory_gb:
        return "cluster.memory_gb is not given"
    available = cluster.memory_gb * 1e9
    text, left = f"a device has {gib(available)}", gib(available - memory.total + memory.slack)
    if fits(memory, cluster) != "unknown":
        return text
    return f"{text}; {'the allocator' if memory.context else 'what is not counted'} may need more than the {left} left"


def peak_flops(cluster: ClusterConfig, precision: str) -> float | None:
    """FLOP/s of a device in `precision` (fp64 | fp32 | bf16 | fp16); None if the cluster does not give them."""
    peak = cluster.peak_tflops
    peak = peak.get(precision) if isinstance(peak, Mapping) else peak
    return peak * 1e12 if peak else None


@dataclass(frozen=True)
class Cost:
    """FLOPs of one step over all ranks, and seconds if the cluster gives rates (else None).

    model_flops: forward and twice as much for backward (72 B s l h^2 (1 + s/(6h) + V/(12 l h)) for a gpt, SC21).
    hardware_flops: with recomputation. compute_s: at the peak rate of the plan's precision, bubble included.
    communication_s: wire bytes and calls of the busiest rank at the links' rates, not overlapped; pushes to
    servers and pulls from them follow each other.
    """

    model_flops: float
    hardware_flops: float
    compute_s: float | None
    communication_s: float | None

    @property
    def step_s(self) -> tuple[float, float] | None:
        """Seconds of a step (without overlap of communication, with full overlap); None if unknown."""
        if self.compute_s is None or self.communication_s is None:
            return None
        return self.compute_s + self.communication_s, max(self.compute_s, self.communication_s)


def cost(plan: Plan, cluster: ClusterConfig, rows: tuple[TrafficRow, ...], makespan_flops: float) -> Cost:
    """Return the Cost of a plan. makespan_flops: the length of the simulated step, in FLOPs of one rank."""
    forward = plan.spec.forward_flops * plan.batch.global_batch
    repeated = sum(block.forward_flops for block in plan.spec.blocks if block.is_recomputed)
    again = repeated * plan.batch.global_batch if plan.runs_again else 0.0
    peak = peak_flops(cluster, plan.precision.name)
    compute = makespan_flops / peak if peak else None
    return Cost(3 * forward, 3 * forward + again, compute, _communication_s(plan, cluster, rows))


@dataclass(frozen=True)
class TrainingTime:
    """Days of training on `tokens` tokens, if the cluster gives rates (else None).

    at_peak: (without overlap of communication, with full overlap). sustained: at SUSTAINED of the peak rate.
    price_per_day: of all devices, if the cluster gives that of one.
    """

    tokens: float
    steps: int
    at_peak: tuple[float, float] | None
    sustained: float | None
    price_per_day: float | None


def training_time(plan: Plan, cluster: ClusterConfig, cost: Cost, tokens: float) -> TrainingTime:
    """Return the time to train a language model on `tokens` tokens."""
    steps = ceil(tokens / (plan.batch.global_batch * plan.spec.seq))
    peak = peak_flops(cluster, plan.precision.name)
    sustained = steps * cost.hardware_flops / (plan.num_workers * peak * SUSTAINED) / DAY if peak else None
    at_peak = (steps * cost.step_s[0] / DAY, steps * cost.step_s[1] / DAY) if cost.step_s else None
    price = 24 * plan.world * cluster.price_per_gpu_hour if cluster.price_per_gpu_hour else None
    return TrainingTime(tokens, steps, at_peak, sustained, price)


def _communication_s(plan: Plan, cluster: ClusterConfig, rows: tuple[TrafficRow, ...]) -> float | None:
    if not cluster.intra_gb_s:
        return None
    seconds = 0.0
    for row in rows:
        rate = rate_gb_s(plan, cluster, row.axis, row.operation in POINT_TO_POINT)
        if row.calls and not rate:
            return None
        # Servers send only when they have received as much: the pushes, then the pulls.
        sent = row.wire_bytes * (2 if plan.servers and row.axis == WORLD else 1)
        one_step = sent / ((rate or 1) * 1e9) + row.calls * (cluster.latency_us or 0.0) * 1e-6
        seconds += one_step / row.every
    return seconds
