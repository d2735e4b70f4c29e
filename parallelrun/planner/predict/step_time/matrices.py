"""The time in which Muon orthogonalises matrices, and sends them to their owners and back."""

from __future__ import annotations

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.orthogonalising import NS_STEPS, collectives, exchanges, product_dtype
from parallelrun.planner.predict.step_time.kernels import product_s
from parallelrun.planner.predict.step_time.links import collective_s
from parallelrun.planner.predict.step_time.rates import Rates


def orthogonalising_s(plan: Plan, cluster: ClusterConfig, rates: Rates) -> float | None:
    """Seconds of the first rank, which computes most; None if the cluster gives no rate for a link."""
    coordinate, width = plan.mesh.coordinate(0), BYTES[product_dtype(plan)]
    seconds = 0.0
    for row in collectives(plan, coordinate):
        sending = collective_s(row, plan, cluster, rates)
        if sending is None:
            return None
        seconds += sending
    for exchange in exchanges(plan, coordinate["pp"]):
        for kind, count in exchange.owned(coordinate):
            short, long = kind.sides
            products = (short, long, short), (short, short, short), (short, short, long)
            of_one = NS_STEPS * sum(product_s(*sizes, width, rates) for sizes in products)
            seconds += count * max(1, kind.experts) * of_one
    return seconds
