"""Ranks that share the cores of their host: training on CPUs.

A rank that has several cores to itself computes with as many threads. Where a host has more ranks than cores, a rank
works a part of the time: while all of them have work, each gets its share of the cores, and the time of a step is the
work of all ranks over the cores. A rank that waits for another stage leaves its share to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.pipeline_schedule import Action
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.hosts import ranks_per_node
from parallelrun.planner.predict import simulate
from parallelrun.planner.predict.step_time import host
from parallelrun.planner.predict.step_time.rates import Rates

MOST_ACTIONS = 20_000  # a step of more is not simulated on shared cores: a bound stands for it


def ranks_per_core(plan: Plan, cluster: ClusterConfig) -> float:
    """The working ranks of a host for each of its cores, at least 1; 1 where every rank has a device of its own.

    Servers wait while workers compute, and are not counted.
    """
    return max(1.0, _ranks(plan, cluster) / cluster.cores) if cluster.cores else 1.0


def threads(plan: Plan, cluster: ClusterConfig) -> int:
    """The threads with which a rank computes: its share of the cores, as the launcher sets it; 1 for a device."""
    on_host = min(ranks_per_node(cluster, plan.world), plan.world)
    return max(1, cluster.cores // on_host) if cluster.cores else 1


def _ranks(plan: Plan, cluster: ClusterConfig) -> int:
    return min(ranks_per_node(cluster, plan.world), plan.num_workers)


def of_a_rank(rates: Rates, plan: Plan, cluster: ClusterConfig) -> Rates:
    """The rates of one rank of the plan while all ranks work. Unchanged where every rank has a device of its own.

    A collective costs the host, beside its own time, some operations around it.
    """
    if not cluster.cores:
        return rates
    crowd = ranks_per_core(plan, cluster)
    around_s = host.OF_CALL * rates.operation_s
    speed = (1 + (threads(plan, cluster) - 1) * cluster.thread_efficiency) / crowd
    return replace(
        rates,
        peak_flops=rates.peak_flops * speed,
        memory_bytes_s=rates.memory_bytes_s * speed,
        kernel_s=rates.kernel_s * crowd,
        operation_s=rates.operation_s * crowd,
        step_s=rates.step_s * crowd,
        intra_bytes_s=rates.intra_bytes_s / crowd,
        collective_s=(rates.collective_s + around_s) * crowd,
        hop_s=rates.hop_s * crowd,
    )


def makespan(plan: Plan, cluster: ClusterConfig, times: simulate.Times, busy: float) -> float:
    """Seconds of a schedule. times: of actions while all ranks work; busy: the mean seconds in which a pp rank works.

    Where ranks share cores, those that work while others wait are faster, up to the rate of a whole core. A step of too
    many actions gets the larger of two bounds: its work, and its length if every rank had a core.
    """
    crowd = ranks_per_core(plan, cluster)
    full = simulate.run(plan, times).makespan
    if crowd == 1:
        return full
    if 2 * plan.batch.microbatches * len(plan.stages) > MOST_ACTIONS:
        return max(busy, full / crowd)
    most = plan.mesh.size("pp") / crowd  # pp ranks that can work at the rate of a whole core
    return shared(plan.pipeline.actions(plan), {kind: [t / crowd for t in row] for kind, row in times.items()}, most)


def shared(orders: Sequence[Sequence[Action]], times: simulate.Times, most: float) -> float:
    """The length of a schedule whose ranks share `most` cores: n working ranks each advance at min(1, most / n).

    orders: the actions of each pp rank; times: seconds of each on a core of its own. An action starts when its rank has
    ended the one before and its inputs are there (see `simulate.simulate`).
    """
    last = len(times["F"]) - 1
    place, now = [0] * len(orders), 0.0
    left: dict[int, float] = {}  # rank -> seconds of its current action on a core of its own
    ended: set[tuple[bool, int, int]] = set()  # (is forward, stage, microbatch)
    while True:
        for rank, order in enumerate(orders):
            if rank not in left and place[rank] < len(order) and _is_ready(order[place[rank]], last, ended):
                left[rank] = times[order[place[rank]].kind][order[place[rank]].stage]
        if not left:
            assert all(index == len(order) for index, order in zip(place, orders)), "the schedule is in a deadlock"
            return now
        rate, shortest = min(1.0, most / len(left)), min(left.values())
        now += shortest / rate
        for rank, seconds in list(left.items()):
            left[rank] = seconds - shortest
            if left[rank] <= 1e-12 * now:
                del left[rank]
                action = orders[rank][place[rank]]
                place[rank] += 1
                if action.kind != "W":
                    ended.add((action.kind == "F", action.stage, action.microbatch))


def _is_ready(action: Action, last: int, ended: set[tuple[bool, int, int]]) -> bool:
    if action.kind == "W":
        return True
    if action.kind == "F":
        return action.stage == 0 or (True, action.stage - 1, action.microbatch) in ended
    if action.stage == last:
        return (True, last, action.microbatch) in ended
    return (False, action.stage + 1, action.microbatch) in ended
