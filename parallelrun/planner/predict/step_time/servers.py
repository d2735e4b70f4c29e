"""Seconds that workers and parameter servers spend on gradients and weights in a step.

Everything comes from the predicted messages of workers and servers. A server takes in as many bytes as it sends out:
gradients and weights of the same shards. Messages go through the memory of the hosts, not over the links of GPUs.
"""

from __future__ import annotations

from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import WORLD, Plan
from parallelrun.planner.predict.step_time.kernels import streaming_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import Rates

OPTIMIZER_KERNELS = 20


def why_unknown(plan: Plan, cluster: ClusterConfig) -> str:
    """Return why the time of workers with servers is unknown on a cluster; empty if it is not."""
    if not plan.servers or cluster.cores or cluster.gpus_per_node == 1:
        return ""
    return "parameter servers exchange through the memory of hosts with several GPUs, whose rate is not given"


def exchange(plan: Plan, cluster: ClusterConfig, rates: Rates, computing_s: float) -> tuple[float, float] | None:
    """(seconds of messages and of waiting for servers, seconds of the update); None without the rates of the links.

    computing_s: of a worker's forward and backward. The ranks of a worker sum gradients before they push. Where workers
    are in step, an update follows the last push. Else each has its own, and a worker waits where its servers cannot
    keep up with all of them.
    """
    coordinate = plan.mesh.coordinate(0)
    rows = plan.data.collectives(coordinate["pp"], coordinate, plan)
    own = _seconds([row for row in rows if row.axis == WORLD], plan, cluster, rates)
    inside = _seconds([row for row in rows if row.axis != WORLD], plan, cluster, rates)
    numbers = range(plan.servers)
    of_servers = [_seconds(plan.data.server_collectives(server, plan), plan, cluster, rates) for server in numbers]
    if own is None or inside is None or any(seconds is None for seconds in of_servers):
        return None
    busiest = max(seconds or 0.0 for seconds in of_servers)
    heaviest = max((plan.data.server_memory(server, plan) for server in numbers), key=lambda memory: memory.gradients)
    updated = heaviest.gradients / (1 + plan.num_replicas)  # gradients: of an update, and of every push
    update = streaming_s(2 * heaviest.optimizer + 3 * updated, OPTIMIZER_KERNELS, rates)
    if plan.data.in_step:
        return inside + 2 * max(own, busiest), update
    served = 2 * busiest + plan.num_replicas * update  # every push is an update of its own
    alone = inside + 2 * max(own, busiest / plan.num_replicas) + update
    return alone - update + max(0.0, served - computing_s - alone), update


def _seconds(rows: list[Collective], plan: Plan, cluster: ClusterConfig, rates: Rates) -> float | None:
    """Seconds of what one rank sends."""
    times = [collective_s(row, plan, cluster, rates) for row in rows if row.operation != "recv"]
    seconds = [row_s for row_s in times if row_s is not None]
    return sum(seconds) if len(seconds) == len(times) else None
