"""The strategies that `data_axis` compares, with the settings of a plan. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from parallelrun.base.precision import BYTES
from parallelrun.base.wording import counted
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict import data_cost as forms
from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.data_cost import Exchange, Link
from parallelrun.planner.predict.traffic import traffic_of

SECONDS, RELATIVE = "s", "D/B"


@dataclass(frozen=True)
class Fabric:
    """The links of the ranks of one data group. per_host: how many of them share a host. across: of one rank, None
    where the cluster does not give it. unit: `s`, or `D/B` where rates are unknown: times are then multiples of sending
    all gradients once, without latency."""

    inside: Link
    across: Link | None
    per_host: int
    unit: str

    def between(self, n: int) -> Link | None:
        """The slowest link among n neighbouring ranks."""
        return self.inside if n <= self.per_host else self.across

    def pooled(self, n: int) -> Link | None:
        """The link of a collective among n neighbouring ranks: it leaves a host by the ports of all its ranks there.

        The host that has fewest of them decides.
        """
        if n <= self.per_host or self.across is None:
            return self.between(n)
        ports = n % self.per_host or self.per_host
        rate = min(self.inside.bytes_per_s, ports * self.across.bytes_per_s)
        return Link(rate, self.across.latency_s)


@dataclass(frozen=True)
class Case:
    """The plan and its sizes, as all candidates need them."""

    plan: Plan
    size: int
    nodes: int
    fabric: Fabric
    compute_s: float | None


@dataclass(frozen=True)
class Candidate:
    """One closed form. cost: (nodes, link) -> exchange, for 2 nodes and more; None for an impossible number. servers:
    how many of the nodes. pooled: its link is `Fabric.pooled`, that of a collective; else every rank sends by its own
    port."""

    name: str
    label: str
    cost: Callable[[int, Link], Exchange | None]
    servers: Callable[[int], int] = lambda nodes: 0
    pooled: bool = False


def candidates(case: Case) -> list[Candidate]:
    """All candidates; the plan's own strategy once more where its settings change its cost."""
    return [*_reductions(case, case.size), *_own(case), *_shardings(case), *_servers(case)]


def _reductions(case: Case, size: float) -> list[Candidate]:
    """The all-reduces, of `size` bytes."""
    form = case.plan.data.exchange_form(case.plan)
    group = form.group_size if form.group_size > 1 else case.fabric.per_host
    inside = case.fabric.pooled(group)
    native = form.native  # by the backend, over all ports; else message by message

    def hierarchical(nodes: int, link: Link) -> Exchange | None:
        if inside is None or nodes % group or not 1 < group < nodes:
            return None
        return forms.hierarchical(size, group, nodes // group, inside, link)

    return [
        Candidate(forms.RING, "ring all-reduce", partial(forms.ring, size), pooled=native),
        Candidate(forms.HALVING, "halving-doubling", partial(forms.halving_doubling, size)),
        Candidate(forms.TREES, "two binary trees", partial(forms.tree, size), pooled=native),
        Candidate(forms.BINOMIAL, "binomial tree", partial(forms.binomial_tree, size)),
        Candidate(forms.HIERARCHICAL, f"hierarchical, groups of {group}", hierarchical),
    ]


def _own(case: Case) -> list[Candidate]:
    """The plan's all-reduce where it sends less than all gradients in every step: compressed, or every few steps."""
    plan = case.plan
    form, every = plan.data.exchange_form(plan), plan.data.sync_every
    if not form.compression and every == 1:
        return []
    size = _compressed_bytes(plan) if form.compression else case.size
    base = next((candidate for candidate in _reductions(case, size) if candidate.name == form.name), None)
    if base is None or not size:  # Adasum's updates and sums within process sets are no sum over all of dp
        return []

    def cost(nodes: int, link: Link) -> Exchange | None:
        exchange = base.cost(nodes, link)
        return exchange.every(every) if exchange else None

    label = base.label.removesuffix(" all-reduce")
    label += f", {form.compression}" if form.compression else ""
    label += f", every {every} steps" if every > 1 else ""
    return [Candidate(forms.OWN, label, cost, pooled=base.pooled)]


def _compressed_bytes(plan: Plan) -> float:
    """Bytes that the plan predicts to sum over dp; point to point it sends 2(n-1)/n of that."""
    busiest, degree = traffic_of(plan)[0], plan.mesh.size("dp")
    rows = [row for row in prediction.collectives(plan, busiest) if row.axis == "dp" and row.purpose == "gradients"]
    whole = sum(row.payload_bytes for row in rows if row.operation == "all_reduce")
    sent = sum(row.payload_bytes for row in rows if row.operation == "send")
    return whole + sent * degree / (2 * (degree - 1))


def _shardings(case: Case) -> list[Candidate]:
    """The strategies that shard weights or the optimizer's state: ZeRO, FSDP and forms.HSDP."""
    plan, size, microbatches = case.plan, case.size, case.plan.batch.microbatches
    form, again = plan.data.exchange_form(plan), 2 * microbatches
    scatters = 1 if form.scatters_once else microbatches
    precision = plan.precision
    gathered = size * BYTES[precision.compute] / BYTES[precision.reduce] if form.gathers_rounded else size
    shard, inside = plan.data.shard, case.fabric.pooled(plan.data.shard)

    def sharded(scatters: int, gathers: int) -> Callable[[int, Link], Exchange]:
        return lambda n, link: forms.sharded(size, n, link, scatters) + forms.sharded(gathered, n, link, gathers)

    def hsdp(nodes: int, link: Link) -> Exchange | None:
        if nodes % shard or nodes == shard or inside is None:
            return None
        own = sharded(scatters, again if form.gathers_again else 1)(shard, inside)
        return own + forms.ring(size / shard, nodes // shard, link)

    label = f"fsdp: gathered {again} times" + (f", scattered {scatters}" if scatters > 1 else "")
    found = [
        Candidate(forms.SHARDED, "zero: scatter and gather", sharded(1, 1), pooled=True),
        Candidate(forms.GATHERED_AGAIN, label, sharded(scatters, again), pooled=True),
    ]
    if form.name == forms.SCATTERED_AGAIN:
        label = f"{plan.data.kind}: scattered {microbatches} times"
        found.append(Candidate(forms.SCATTERED_AGAIN, label, sharded(microbatches, 1), pooled=True))
    if 1 < shard < case.nodes:
        found.append(Candidate(forms.HSDP, f"hsdp, shards of {shard}", hsdp))
    return found


def _servers(case: Case) -> list[Candidate]:
    size, own, compute = case.size, case.plan.servers, case.compute_s

    def best(nodes: int) -> int:
        link = case.fabric.between(nodes)
        if compute is None or link is None:  # as if communication were all
            return nodes // 2
        return nodes - forms.best_num_workers(size, nodes, link, compute)

    def served(name: str, label: str, servers: Callable[[int], int]) -> Candidate:
        def cost(nodes: int, link: Link) -> Exchange | None:
            count = servers(nodes)
            return forms.parameter_server(size, nodes - count, count, link) if nodes > count else None

        return Candidate(name, label, cost, servers)

    helpers = own or 1
    return [
        served(forms.ONE_SERVER, "ps, 1 server", lambda nodes: 1),
        *([served(forms.SERVERS, f"ps, {counted(own, 'server')}", lambda nodes: own)] if own > 1 else []),
        served(forms.BEST, "ps, best share" if compute else "ps, half serve", best),
        Candidate(forms.COLOCATED, "co-located ps", partial(forms.colocated_servers, size)),
        Candidate(
            forms.HELPED, f"co-located ps + {helpers} CPU", lambda n, link: forms.helped_servers(size, n, helpers, link)
        ),
    ]


def chosen(case: Case) -> str | None:
    """The name of the plan's own candidate; None where its strategy has no closed form."""
    return forms.OWN if _own(case) else case.plan.data.exchange_form(case.plan).name
