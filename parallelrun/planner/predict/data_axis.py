"""Cost of combining a plan's gradients under every data-parallel strategy, in closed form. Torch-free.

On equal nodes: where a parameter server has 6 workers and 2 servers, a ring has 8 workers. One node of the data axis is
one rank with its own links, as `cluster` gives them per device. `prediction` says what the plan's own strategy sends,
to the byte; here strategies are compared, without buckets, padding and uneven shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallelrun.base.precision import BYTES
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.planner.contract.parameters import distinct_parameters
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.pieces.expert_axes import replica_axis
from parallelrun.planner.predict import data_candidates, prediction
from parallelrun.planner.predict import data_cost as forms
from parallelrun.planner.predict.cluster_cost import Cost
from parallelrun.planner.predict.data_candidates import RELATIVE, SECONDS, Candidate, Case, Fabric
from parallelrun.planner.predict.data_cost import Exchange, Link

EVERYWHERE = 2**30  # ranks of a host, where the cluster does not name several hosts
ALL_DRAWN, FEWEST_DRAWN = 64, 8  # above the former only powers of two are drawn


@dataclass(frozen=True)
class Point:
    """One strategy on `nodes` nodes of the data axis.

    samples_per_s: with no communication overlapped and with all of it, at the same samples per worker; None where the
    cluster does not give the speed of a device.
    """

    nodes: int
    workers: int
    servers: int
    exchange: Exchange
    samples_per_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class StrategyCost:
    """The cost of one strategy. here: on the plan's own nodes, None where it is impossible there. chosen: it is the
    plan's. curve: over the number of nodes."""

    name: str
    label: str
    chosen: bool
    here: Point | None
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class BestShare:
    """The share of nodes that should be workers, the others servers, for most samples a second; also in whole nodes.

    Each with no communication overlapped and with all of it. ratio: 2D / (B x compute) (`best_worker_share`).
    """

    ratio: float
    share: float
    share_overlapped: float
    workers: int
    workers_overlapped: int


@dataclass(frozen=True)
class DataAxis:
    """The comparison of all strategies.

    gradient_bytes: D, of the rank that holds most. nodes: ranks of a data group and servers. compute_s: of a worker
    in a step, at the peak rate. worker_batch: its samples. best: None where the rates are not known. expert_bytes:
    gradients of distributed experts, which are combined over `expert_dp` and not compared.
    """

    gradient_bytes: int
    nodes: int
    workers: int
    servers: int
    fabric: Fabric
    compute_s: float | None
    worker_batch: int
    strategies: tuple[StrategyCost, ...]
    best: BestShare | None
    expert_bytes: int = 0

    @property
    def chosen(self) -> StrategyCost | None:
        """The plan's own strategy; None for one without a closed form."""
        return next((strategy for strategy in self.strategies if strategy.chosen), None)


def costs(plan: Plan, cluster: ClusterConfig, cost: Cost) -> DataAxis | None:
    """The data axis of `plan` under every strategy; None where there is nothing to combine.

    cost: of a step. A strategy's time is added to that of the other axes (`agreed` does so for the plan's own).
    """
    workers = plan.mesh.size("dp")
    nodes, size = workers + plan.servers, gradient_bytes(plan)
    if nodes == 1 or not size:
        return None
    fabric = _fabric(plan, cluster, nodes, size)
    compute = cost.compute_s if fabric.unit == SECONDS else None
    case = Case(plan, size, nodes, fabric, compute)
    own = data_candidates.chosen(case)
    strategies = []
    for candidate in data_candidates.candidates(case):
        points = {number: _point(candidate, case, number, cost) for number in drawn_nodes(nodes)}
        curve = tuple(point for point in points.values() if point)
        if curve:
            is_own = candidate.name == own
            strategies.append(StrategyCost(candidate.name, candidate.label, is_own, points[nodes], curve))
    expert_bytes = gradient_bytes(plan, "expert_dp") if plan.mesh.size("expert_dp") > 1 else 0
    return DataAxis(
        size, nodes, workers, plan.servers, fabric, compute, plan.batch.replica_batch, tuple(strategies), _best(case),
        expert_bytes,
    )  # fmt: skip


def agreed(cost: Cost, known: DataAxis | None) -> Cost:
    """The cost of a step in which the plan's own strategy has its closed form, so that a screen shows one rate."""
    own = known.chosen if known and known.fabric.unit == SECONDS else None
    if own is None or own.here is None or cost.communication_s is None:
        return cost
    seconds = own.here.exchange.seconds
    return replace(cost, communication_s=cost.beside_s + seconds, data_s=seconds)


def gradient_bytes(plan: Plan, axis: str = "dp") -> int:
    """Bytes of the gradients that a rank combines over `axis`, on the pp rank that holds most of those.

    Over dp this is everything but experts that are distributed over ep, which have fewer copies (`expert_dp`).
    """
    numels = [
        sum(
            count * held.layout.local_numel(held.spec.shape, plan.mesh.sizes, {})
            for held, count in distinct_parameters(plan, pp_ranks[0])
            if not held.spec.frozen and replica_axis(held.layout, plan) == axis
        )
        for pp_ranks in prediction.pp_rank_classes(plan)
    ]
    return BYTES[plan.precision.reduce] * max(numels)


def drawn_nodes(nodes: int) -> list[int]:
    """From 2 to twice the plan's nodes, at least to 8: all of them, or from 64 on powers of two and the plan's own."""
    last = max(FEWEST_DRAWN, 2 * nodes)
    if last <= ALL_DRAWN:
        return [*range(2, last + 1)]
    return sorted({*(2**k for k in range(1, last.bit_length())), nodes, last})


def _point(candidate: Candidate, case: Case, nodes: int, cost: Cost) -> Point | None:
    link = case.fabric.pooled(nodes) if candidate.pooled else case.fabric.between(nodes)
    exchange = candidate.cost(nodes, link) if link else None
    if exchange is None:
        return None
    servers, rates = candidate.servers(nodes), None
    if case.compute_s is not None:
        samples = (nodes - servers) * case.plan.batch.replica_batch
        sent = cost.beside_s + exchange.seconds
        rates = (samples / (case.compute_s + sent), samples / max(case.compute_s, sent))
    return Point(nodes, nodes - servers, servers, exchange, rates)


def _fabric(plan: Plan, cluster: ClusterConfig, nodes: int, size: int) -> Fabric:
    """The links of a data group, whose members are `tp` ranks apart."""
    host = cluster.gpus_per_node or (-(-plan.world // cluster.nodes) if cluster.nodes else EVERYWHERE)
    per_host = max(1, host // plan.mesh.size("tp"))
    latency = (cluster.latency_us or 0.0) * 1e-6
    inside, across = (Link(rate * 1e9, latency) if rate else None for rate in (cluster.intra_gb_s, cluster.inter_gb_s))
    if (inside if nodes <= per_host else across) is None or (per_host > 1 and inside is None):
        unit = Link(size)
        return Fabric(unit, unit, per_host, RELATIVE)
    return Fabric(inside or across or Link(size), across, per_host, SECONDS)


def _best(case: Case) -> BestShare | None:
    link = case.fabric.between(case.nodes)
    if not case.compute_s or link is None:
        return None
    ratio = 2 * case.size / (link.bytes_per_s * case.compute_s)
    shares = [forms.best_worker_share(ratio, overlapped) for overlapped in (False, True)]
    workers = [
        forms.best_num_workers(case.size, case.nodes, link, case.compute_s, overlapped) for overlapped in (False, True)
    ]
    return BestShare(ratio, shares[0], shares[1], workers[0], workers[1])
