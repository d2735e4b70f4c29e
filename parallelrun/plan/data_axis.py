"""What combining the gradients would cost a plan under every way to run its data axis. Torch-free, closed form.

On equal nodes: where a parameter server has 6 workers and 2 servers, a ring has 8 workers. One node of the data axis is
one rank with its own links, as `cluster` gives them per device. What the plan's own way really sends, to the byte, is
`account`'s to say; here ways are compared, and buckets, padding and uneven shards are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from parallelrun.config.schema import ClusterConfig
from parallelrun.plan import account
from parallelrun.plan import data_cost as forms
from parallelrun.plan.data_cost import Exchange, Link
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES
from parallelrun.train.parameters import held_parameters

RING, HALVING, TREES, HIERARCHICAL = "ring", "halving-doubling", "two trees", "hierarchical"
OWN = "own settings"
SHARDED, SCATTERED_AGAIN = "reduce-scatter + gather", "gradients scattered again"
GATHERED_AGAIN, HSDP = "weights gathered again", "shards inside groups"
ONE_SERVER, SERVERS, BEST, COLOCATED, HELPED = "one server", "servers", "best share serves", "co-located", "helped"
OF_ALGORITHM = {"native": RING, "ring": RING, "halving_doubling": HALVING, "hierarchical": HIERARCHICAL}
EVERYWHERE = 2**30  # ranks of a host, where the cluster does not say that there are several hosts
ALL_DRAWN, FEWEST_DRAWN = 64, 8  # above the former only powers of two are drawn
SECONDS, RELATIVE = "s", "D/B"


@dataclass(frozen=True)
class Fabric:
    """The links as the ranks of one data group see them. per_host: how many of them share a host. across: None where
    the cluster does not say. unit: `s`, or, where the rates are not known, `D/B`: times are then multiples of sending
    all gradients once, latency left out."""

    inside: Link
    across: Link | None
    per_host: int
    unit: str

    def between(self, n: int) -> Link | None:
        """The slowest link among n neighbouring ranks."""
        return self.inside if n <= self.per_host else self.across


@dataclass(frozen=True)
class Point:
    """One way on `nodes` nodes of the data axis. samples_per_s: with nothing overlapped and with all of it, each worker
    keeping its samples, where the cluster says how fast a device computes."""

    nodes: int
    workers: int
    servers: int
    exchange: Exchange
    samples_per_s: tuple[float, float] | None = None


@dataclass(frozen=True)
class Way:
    """One way to combine the gradients. here: on the plan's own nodes, None where it is not possible on them.
    chosen: the plan's. curve: over the number of nodes."""

    name: str
    label: str
    chosen: bool
    here: Point | None
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class BestShare:
    """How many of the nodes should work, the others serving, for most samples a second, and that in whole nodes; with
    nothing overlapped and with all of it. ratio: 2D / (B x compute) (`data_cost.best_worker_share`)."""

    ratio: float
    share: float
    share_overlapped: float
    workers: int
    workers_overlapped: int


@dataclass(frozen=True)
class DataAxis:
    """gradient_bytes: D, of the rank that holds most. nodes: ranks of a data group and servers. compute_s: of a worker
    in a step, at the peak rate. worker_batch: its samples. best: None where the rates are not known."""

    gradient_bytes: int
    nodes: int
    workers: int
    servers: int
    fabric: Fabric
    compute_s: float | None
    worker_batch: int
    ways: tuple[Way, ...]
    best: BestShare | None

    @property
    def chosen(self) -> Way | None:
        """The plan's own way; None for one that is not known here."""
        return next((way for way in self.ways if way.chosen), None)


def costs(plan: Plan, cluster: ClusterConfig, compute_s: float | None) -> DataAxis | None:
    """The data axis of `plan` under every way; None where there is nothing to combine.

    compute_s: of one rank in a step (`account.Cost`).
    """
    workers = plan.mesh.size("dp")
    nodes, size = workers + plan.servers, gradient_bytes(plan)
    if nodes == 1 or not size:
        return None
    fabric = _fabric(plan, cluster, nodes, size)
    compute = compute_s if fabric.unit == SECONDS else None
    case = _Case(plan, size, nodes, fabric, compute)
    candidates = _candidates(case)
    chosen = OWN if any(candidate.name == OWN for candidate in candidates) else _chosen(plan)
    ways = [_way(candidate, case, chosen) for candidate in candidates]
    return DataAxis(
        size, nodes, workers, plan.servers, fabric, compute, plan.batch.replica_batch,
        tuple(way for way in ways if way.here or way.curve), _best(case),
    )  # fmt: skip


def gradient_bytes(plan: Plan) -> int:
    """Bytes of the gradients that a rank combines with its data group, on the pp coordinate that holds most."""
    numels = [
        sum(
            prod(held.layout.local_shape(held.spec.shape, plan.mesh.sizes, {}))
            for held in held_parameters(plan, positions[0])
            if not held.spec.frozen
        )
        for positions in account.position_classes(plan)
    ]
    return BYTES[plan.precision.reduce] * max(numels)


def drawn_nodes(nodes: int) -> list[int]:
    """From 2 to twice the plan's nodes, at least to 8: all of them, or from 64 on powers of two and the plan's own."""
    last = max(FEWEST_DRAWN, 2 * nodes)
    if last <= ALL_DRAWN:
        return [*range(2, last + 1)]
    return sorted({*(2**k for k in range(1, last.bit_length())), nodes, last})


@dataclass(frozen=True)
class _Case:
    """What all ways are asked about."""

    plan: Plan
    size: int
    nodes: int
    fabric: Fabric
    compute_s: float | None

    @property
    def gathered(self) -> float:
        """Bytes of the weights as FSDP gathers them: in the dtype that computes."""
        precision = self.plan.precision
        return self.size * BYTES[precision.compute] / BYTES[precision.reduce]


@dataclass(frozen=True)
class _Candidate:
    """cost: (nodes, link) -> exchange, asked of 2 nodes and more. legal: on how many nodes. servers: among nodes."""

    name: str
    label: str
    cost: Callable[[int, Link], Exchange]
    legal: Callable[[int], bool] = lambda nodes: True
    servers: Callable[[int], int] = lambda nodes: 0


def _candidates(case: _Case) -> list[_Candidate]:
    """Every way; the plan's own once more where its settings make it another."""
    return [*_reductions(case, case.size), *_own(case), *_shardings(case), *_servers(case)]


def _reductions(case: _Case, size: float) -> list[_Candidate]:
    """The all-reduces, of `size` bytes."""
    fabric = case.fabric
    algorithm = getattr(case.plan.data, "algorithm", None)  # of the ways that have several
    group = algorithm.group_size if algorithm and algorithm.group_size > 1 else fabric.per_host
    inside = fabric.between(group)

    def hierarchical(nodes: int, link: Link) -> Exchange:
        assert inside is not None
        return forms.hierarchical(size, group, nodes // group, inside, link)

    return [
        _Candidate(RING, "ring all-reduce", lambda n, link: forms.ring(size, n, link)),
        _Candidate(HALVING, "halving-doubling", lambda n, link: forms.halving_doubling(size, n, link)),
        _Candidate(TREES, "two binary trees", lambda n, link: forms.tree(size, n, link)),
        _Candidate(
            HIERARCHICAL, f"hierarchical, groups of {group}", hierarchical,
            legal=lambda n: 1 < group < n and n % group == 0 and inside is not None,
        ),
    ]  # fmt: skip


def _own(case: _Case) -> list[_Candidate]:
    """The plan's all-reduce where it sends less than all gradients in every step: compressed, or every few steps."""
    plan = case.plan
    compression = getattr(getattr(plan.data, "compression", None), "kind", "none")
    every = plan.data.sync_every
    if compression == "none" and every == 1:
        return []
    size = case.size if compression == "none" else _compressed_bytes(plan)
    algorithm = _algorithm(plan)
    base = next((candidate for candidate in _reductions(case, size) if candidate.name == algorithm), None)
    if base is None:
        return []
    label = base.label.removesuffix(" all-reduce")
    label += f", {compression}" if compression != "none" else ""
    label += f", every {every} steps" if every > 1 else ""
    return [_Candidate(OWN, label, lambda n, link: base.cost(n, link).every(every), base.legal)]


def _compressed_bytes(plan: Plan) -> float:
    """What the plan's own account says it sums over dp; point to point it sends 2(n-1)/n of that."""
    busiest, degree = account.traffic(plan)[0], plan.mesh.size("dp")
    rows = [row for row in account.collectives(plan, busiest) if row.axis == "dp" and row.purpose == "gradients"]
    whole = sum(row.payload_bytes for row in rows if row.operation == "all_reduce")
    sent = sum(row.payload_bytes for row in rows if row.operation == "send")
    return whole + sent * degree / (2 * (degree - 1))


def _shardings(case: _Case) -> list[_Candidate]:
    """What shards weights or the optimizer's state: ZeRO, FSDP and HSDP."""
    plan, size = case.plan, case.size
    again = 2 * plan.batch.microbatches
    gathered = case.gathered if plan.data.kind == "fsdp" else size

    def sharded(scatters: int, gathers: int) -> Callable[[int, Link], Exchange]:
        return lambda n, link: forms.sharded(size, n, link, scatters) + forms.sharded(gathered, n, link, gathers)

    found = [
        _Candidate(SHARDED, "zero: scatter and gather", sharded(1, 1)),
        _Candidate(GATHERED_AGAIN, f"fsdp: gathered {again} times", sharded(1, again)),
    ]
    if _chosen(plan) == SCATTERED_AGAIN:
        scatters = plan.batch.microbatches
        found.append(_Candidate(SCATTERED_AGAIN, f"zero2: scattered {scatters} times", sharded(scatters, 1)))
    shard, inside = plan.data.shard, case.fabric.between(plan.data.shard)
    if not 1 < shard < case.nodes:
        return found
    gathers = again if plan.data.reshard_after_forward else 1

    def hsdp(nodes: int, link: Link) -> Exchange:
        assert inside is not None
        own = forms.sharded(size, shard, inside, 1) + forms.sharded(gathered, shard, inside, gathers)
        return own + forms.ring(size / shard, nodes // shard, link)

    def legal(nodes: int) -> bool:
        return nodes % shard == 0 and nodes > shard and inside is not None

    return [*found, _Candidate(HSDP, f"hsdp, shards of {shard}", hsdp, legal)]


def _servers(case: _Case) -> list[_Candidate]:
    size, own, compute = case.size, case.plan.servers, case.compute_s

    def served(nodes: int, servers: int, link: Link) -> Exchange:
        return forms.parameter_server(size, nodes - servers, servers, link)

    def best(nodes: int) -> int:
        link = case.fabric.between(nodes)
        if compute is None or link is None:  # as if communication were all
            return nodes // 2
        return nodes - forms.best_num_workers(size, nodes, link, compute)

    helpers = own or 1
    found = [_Candidate(ONE_SERVER, "ps, 1 server", lambda n, link: served(n, 1, link), servers=lambda n: 1)]
    if own > 1:
        found.append(
            _Candidate(SERVERS, f"ps, {own} servers", lambda n, link: served(n, own, link),
                       legal=lambda n: n > own, servers=lambda n: own)
        )  # fmt: skip
    label = "ps, best share" if compute else "ps, half serve"
    return [
        *found,
        _Candidate(BEST, label, lambda n, link: served(n, best(n), link), servers=best),
        _Candidate(COLOCATED, "co-located ps", lambda n, link: forms.colocated_servers(size, n, link)),
        _Candidate(
            HELPED, f"co-located ps + {helpers} CPU",
            lambda n, link: forms.helped_servers(size, n, helpers, link),
        ),
    ]  # fmt: skip


def _way(candidate: _Candidate, case: _Case, chosen: str | None) -> Way:
    curve = [_point(candidate, case, nodes) for nodes in drawn_nodes(case.nodes)]
    return Way(
        candidate.name, candidate.label, candidate.name == chosen, _point(candidate, case, case.nodes),
        tuple(point for point in curve if point is not None),
    )  # fmt: skip


def _point(candidate: _Candidate, case: _Case, nodes: int) -> Point | None:
    link = case.fabric.between(nodes)
    if link is None or not candidate.legal(nodes):
        return None
    servers, exchange = candidate.servers(nodes), candidate.cost(nodes, link)
    rates = None
    if case.compute_s is not None:
        samples = (nodes - servers) * case.plan.batch.replica_batch
        seconds = [forms.step_seconds(case.compute_s, exchange, overlapped) for overlapped in (False, True)]
        rates = (samples / seconds[0], samples / seconds[1])
    return Point(nodes, nodes - servers, servers, exchange, rates)


def _chosen(plan: Plan) -> str | None:
    """The name of the plan's own way; None for a way that is not known here."""
    way = plan.data
    if way.kind == "fsdp":
        if 1 < way.shard < plan.mesh.size("dp"):
            return HSDP
        return GATHERED_AGAIN if way.reshard_after_forward else SHARDED
    if way.kind == "ps":
        return SERVERS if plan.servers > 1 else ONE_SERVER
    if way.kind == "zero2" and plan.batch.microbatches > 1 and plan.pipeline.kind not in ("zero_bubble", "zbv"):
        return SCATTERED_AGAIN  # in every backward pass, unless gradients come after all of them
    return SHARDED if way.kind in ("zero1", "zero2") else _algorithm(plan)


def _algorithm(plan: Plan) -> str | None:
    """How a way of whole copies sums; the backend's own all-reduce counts as a ring."""
    if plan.data.kind not in ("ddp", "ring", "horovod", "local_sgd", "diloco"):
        return None
    return OF_ALGORITHM.get(getattr(getattr(plan.data, "algorithm", None), "name", "native"))


def _fabric(plan: Plan, cluster: ClusterConfig, nodes: int, size: int) -> Fabric:
    """Members of a data group lie `tp` ranks apart."""
    host = cluster.gpus_per_node or (-(-plan.world // cluster.nodes) if cluster.nodes else EVERYWHERE)
    per_host = max(1, host // plan.mesh.size("tp"))
    latency = (cluster.latency_us or 0.0) * 1e-6
    inside, across = (Link(rate * 1e9, latency) if rate else None for rate in (cluster.intra_gb_s, cluster.inter_gb_s))
    if (inside if nodes <= per_host else across) is None or (per_host > 1 and inside is None):
        unit = Link(size)
        return Fabric(unit, unit, per_host, RELATIVE)
    return Fabric(inside or across or Link(size), across, per_host, SECONDS)


def _best(case: _Case) -> BestShare | None:
    link = case.fabric.between(case.nodes)
    if not case.compute_s or link is None:
        return None
    ratio = 2 * case.size / (link.bytes_per_s * case.compute_s)
    workers = [
        forms.best_num_workers(case.size, case.nodes, link, case.compute_s, overlapped) for overlapped in (False, True)
    ]
    shares = [forms.best_worker_share(ratio, overlapped) for overlapped in (False, True)]
    return BestShare(ratio, shares[0], shares[1], workers[0], workers[1])
