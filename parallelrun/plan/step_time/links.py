"""Seconds of a predicted collective on the links of a cluster: a latency for each call, and bytes over the rate."""

from __future__ import annotations

from parallelrun.config.schema import ClusterConfig
from parallelrun.plan import prediction
from parallelrun.plan.hosts import ranks_in_node, stays_in_node
from parallelrun.plan.step_time.rates import Rates
from parallelrun.plan.structure import Collective, Plan

MESSAGES = ("send", "recv")


def collective_s(row: Collective, plan: Plan, cluster: ClusterConfig, rates: Rates) -> float | None:
    """Seconds that all calls of a row take; None if its group leaves a node and the cluster gives no rate for that.

    A collective across nodes uses the ports of all ranks of its group on a node: min(intra, q x inter).
    """
    size = prediction.group_size(plan, row.axis)
    if size == 1 or not row.calls:
        return 0.0
    wire = prediction.wire_bytes(row, size)
    if stays_in_node(plan, cluster, row.axis):
        return wire / rates.intra_bytes_s + row.calls * rates.intra_s
    if rates.inter_bytes_s is None:
        return None
    ports = 1 if row.operation in MESSAGES else ranks_in_node(plan, cluster, row.axis)
    return wire / min(rates.intra_bytes_s, ports * rates.inter_bytes_s) + row.calls * rates.inter_s
