"""The strategies that `data_axis` compares, with the settings of a plan. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallelrun.plan import data_cost as forms
from parallelrun.plan import prediction
from parallelrun.plan.data_cost import (
    BEST,
    BINOMIAL,
    COLOCATED,
    GATHERED_AGAIN,
    HALVING,
    HELPED,
    HIERARCHICAL,
    HSDP,
    ONE_SERVER,
    OWN,
    RING,
    SCATTERED_AGAIN,
    SERVERS,
    SHARDED,
    TREES,
    Exchange,
    Link,
)
from parallelrun.plan.structure import Plan
from parallelrun.precision import BYTES
from parallelrun.wording import counted

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

    @property
    def gathered(self) -> float:
        """Bytes of the weights as FSDP gathers them: in the compute dtype."""
        precision = self.plan.precision
        return self.size * BYTES[precision.compute] / BYTES[precision.reduce]


@dataclass(frozen=True)
class Candidate:
    """One closed form. cost: (nodes, link) -> exchange, for 2 nodes and more. legal: whether a number of nodes is
    possible. servers: how many of the nodes. pooled: its link is `Fabric.pooled`, that of a collective; else every rank
    sends by its own port."""

    name: str
    label: str
    cost: Callable[[int, Link], Exchange]
    legal: Callable[[int], bool] = lambda nodes: True
    servers: Callable[[int], int] = lambda nodes: 0
    pooled: bool = False


def candidates(case: Case) -> list[Candidate]:
    """All candidates; the plan's own strategy once more where its settings change its cost."""
    return [*_reductions(case, case.size), *_own(case), *_shardings(case), *_servers(case)]


def _reductions(case: Case, size: float) -> list[Candidate]:
    """The all-reduces, of `size` bytes."""
    fabric = case.fabric
    form = case.plan.data.exchange_form(case.plan)
    group = form.group_size if form.group_size > 1 else fabric.per_host
    inside = fabric.pooled(group)
    native = form.native  # by the backend, over all ports; else message by message

    def hierarchical(nodes: int, link: Link) -> Exchange:
        assert inside is not None
        return forms.hierarchical(size, group, nodes // group, inside, link)

    return [
        Candidate(RING, "ring all-reduce", lambda n, link: forms.ring(size, n, link), pooled=native),
        Candidate(HALVING, "halving-doubling", lambda n, link: forms.halving_doubling(size, n, link)),
        Candidate(TREES, "two binary trees", lambda n, link: forms.tree(size, n, link), pooled=native),
        Candidate(BINOMIAL, "binomial tree", lambda n, link: forms.binomial_tree(size, n, link)),
        Candidate(
            HIERARCHICAL, f"hierarchical, groups of {group}", hierarchical,
            legal=lambda n: 1 < group < n and n % group == 0 and inside is not None,
        ),
    ]  # fmt: skip


def _own(case: Case) -> list[Candidate]:
    """The plan's all-reduce where it sends less than all gradients in every step: compressed, or every few steps."""
    plan = case.plan
    form, every = plan.data.exchange_form(plan), plan.data.sync_every
    if not form.compression and every == 1:
        return []
    size = _compressed_bytes(plan) if form.compression else case.size
    if not size:  # what is sent is no sum over all of dp: Adasum's updates, sums within process sets
        return []
    base = next((candidate for candidate in _reductions(case, size) if candidate.name == form.name), None)
    if base is None:
        return []
    label = base.label.removesuffix(" all-reduce")
    label += f", {form.compression}" if form.compression else ""
    label += f", every {every} steps" if every > 1 else ""
    return [Candidate(OWN, label, lambda n, link: base.cost(n, link).every(every), base.legal, pooled=base.pooled)]


def _compressed_bytes(plan: Plan) -> float:
    """Bytes that the plan predicts to sum over dp; point to point it sends 2(n-1)/n of that."""
    busiest, degree = prediction.traffic(plan)[0], plan.mesh.size("dp")
    rows = [row for row in prediction.collectives(plan, busiest) if row.axis == "dp" and row.purpose == "gradients"]
    whole = sum(row.payload_bytes for row in rows if row.operation == "all_reduce")
    sent = sum(row.payload_bytes for row in rows if row.operation == "send")
    return whole + sent * degree / (2 * (degree - 1))


def _shardings(case: Case) -> list[Candidate]:
    """The strategies that shard weights or the optimizer's state: ZeRO, FSDP and HSDP."""
    plan, size = case.plan, case.size
    form, again = plan.data.exchange_form(plan), 2 * plan.batch.microbatches
    scatters = 1 if form.scatters_once else plan.batch.microbatches
    gathered = case.gathered if form.gathers_rounded else size

    def sharded(scatters: int, gathers: int) -> Callable[[int, Link], Exchange]:
        return lambda n, link: forms.sharded(size, n, link, scatters) + forms.sharded(gathered, n, link, gathers)

    found = [
        Candidate(SHARDED, "zero: scatter and gather", sharded(1, 1), pooled=True),
        Candidate(GATHERED_AGAIN, _fsdp_label(again, scatters), sharded(scatters, again), pooled=True),
    ]
    if form.name == SCATTERED_AGAIN:
        label = f"{plan.data.kind}: scattered {plan.batch.microbatches} times"
        found.append(Candidate(SCATTERED_AGAIN, label, sharded(plan.batch.microbatches, 1), pooled=True))
    shard, inside = plan.data.shard, case.fabric.pooled(plan.data.shard)
    if not 1 < shard < case.nodes:
        return found
    gathers = again if form.gathers_again else 1

    def hsdp(nodes: int, link: Link) -> Exchange:
        assert inside is not None
        own = forms.sharded(size, shard, inside, scatters) + forms.sharded(gathered, shard, inside, gathers)
        return own + forms.ring(size / shard, nodes // shard, link)

    def legal(nodes: int) -> bool:
        return nodes % shard == 0 and nodes > shard and inside is not None

    return [*found, Candidate(HSDP, f"hsdp, shards of {shard}", hsdp, legal)]


def _fsdp_label(gathers: int, scatters: int) -> str:
    return f"fsdp: gathered {gathers} times" + (f", scattered {scatters}" if scatters > 1 else "")


def _servers(case: Case) -> list[Candidate]:
    size, own, compute = case.size, case.plan.servers, case.compute_s

    def served(nodes: int, servers: int, link: Link) -> Exchange:
        return forms.parameter_server(size, nodes - servers, servers, link)

    def best(nodes: int) -> int:
        link = case.fabric.between(nodes)
        if compute is None or link is None:  # as if communication were all
            return nodes // 2
        return nodes - forms.best_num_workers(size, nodes, link, compute)

    helpers = own or 1
    found = [Candidate(ONE_SERVER, "ps, 1 server", lambda n, link: served(n, 1, link), servers=lambda n: 1)]
    if own > 1:
        found.append(
            Candidate(SERVERS, f"ps, {counted(own, 'server')}", lambda n, link: served(n, own, link),
                       legal=lambda n: n > own, servers=lambda n: own)
        )  # fmt: skip
    label = "ps, best share" if compute else "ps, half serve"
    return [
        *found,
        Candidate(BEST, label, lambda n, link: served(n, best(n), link), servers=best),
        Candidate(COLOCATED, "co-located ps", lambda n, link: forms.colocated_servers(size, n, link)),
        Candidate(
            HELPED, f"co-located ps + {helpers} CPU",
            lambda n, link: forms.helped_servers(size, n, helpers, link),
        ),
    ]  # fmt: skip


def chosen(case: Case) -> str | None:
    """The name of the plan's own candidate; None where its strategy has no closed form."""
    return OWN if _own(case) else case.plan.data.exchange_form(case.plan).name
