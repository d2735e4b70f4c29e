"""`search`: the fastest plans of everything that the user has left open. Torch-free.

Best first: candidates wait in the order of a lower bound of their time, and the first is bounded more closely, then
priced, until those in front have been priced and fit. What is behind them cannot be faster.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from parallelrun.config.schema import ClusterConfig, Config, DataStrategyConfig
from parallelrun.config.strategy_keys import narrowed
from parallelrun.errors import ConfigError
from parallelrun.model_spec import ModelSpec
from parallelrun.plan import cluster_cost, device_memory, prediction, routing, rules
from parallelrun.plan.resolve import spec_of
from parallelrun.plan.search.bounds import Bounds
from parallelrun.plan.search.legal import Group, Legal
from parallelrun.plan.search.result import Found, Removed, Search
from parallelrun.plan.search.space import Space
from parallelrun.plan.step_time.step import Known, StepTime, least_s, step_time_with, why_unknown
from parallelrun.plan.structure import Memory, Plan

Leaf = tuple[Group, int, str, DataStrategyConfig]  # micro-batch, recompute, data strategy
NEVER = float("inf")


def search(
    config: Config,
    given: frozenset[str],
    world: int,
    keep: int = 3,
    *,
    against: float | None = None,
    gpus: int | None = None,
) -> Search:
    """Return the `keep` fastest plans on `world` ranks that fit, and what became of all others.

    config: composed, with the strategy that the user has chosen or the default one. given: the dotted keys that the
    user has set: they hold for all plans. against: seconds of a step of a plan to rank. gpus: GPUs of this host, as
    `resolve` takes it. Raises ConfigError where no plan can be listed: an unknown model or a bad value.
    """
    space = Space(config, given, world)
    device = config.device if config.device in ("cpu", "cuda") else "cuda" if gpus else "cpu"
    found = _Searched(Legal(space, _spec(space), device), space.base.cluster, keep)
    found.list()
    found.find(against)
    return found.result(against)


def _spec(space: Space) -> ModelSpec:
    problems = rules.too_large(space.folded) + rules.check(space.folded)
    spec = spec_of(narrowed(space.folded), problems)
    if spec is not None:
        problems += routing.check_model(space.folded, spec.experts) + rules.check_tokens(space.folded, spec)
    if problems or spec is None:
        raise ConfigError(*problems)
    return spec


@dataclass
class _Searched:
    """A search under way. considered: legal candidates. may_fit: those whose lower bound of memory fits."""

    legal: Legal
    cluster: ClusterConfig
    keep: int
    known: Known = field(default_factory=dict)
    considered: int = 0
    may_fit: int = 0
    rows: list[tuple[float, int, Group, int, str, tuple[DataStrategyConfig, ...]]] = field(default_factory=list)
    heavy: list[tuple[int, int, Leaf]] = field(default_factory=list)  # bytes at least, number, candidate
    best: list[Found] = field(default_factory=list)
    unfit: list[Found] = field(default_factory=list)
    unpriced: dict[str, Found] = field(default_factory=dict)
    num_unpriced: Counter[str] = field(default_factory=Counter)
    rank: int = 0

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.legal, self.cluster, self.known)
        self.limit = _most_bytes(self.cluster)

    def list(self) -> None:
        """Look at all candidates: `rows` of those that may fit, `heavy` for the lightest of each row that do not."""
        number, recomputes = count(), self.legal.space.recomputes()
        for group in self.legal.groups():
            held = sorted((self.bounds.held_bytes(group, one), next(number), one) for one in group.datas)
            for micro_batch in group.micro_batches:
                for recompute in recomputes:
                    kept = self.bounds.kept_bytes(group, micro_batch, recompute)
                    fitting = tuple(data for size, _, data in held if size + kept <= self.limit)
                    self.may_fit += len(fitting)
                    if fitting:
                        least = self.bounds.least_s(group, micro_batch, recompute)
                        self.rows.append((least, next(number), group, micro_batch, recompute, fitting))
                    if len(fitting) < len(held):
                        size, _, data = held[len(fitting)]
                        self.heavy.append((size + kept, next(number), (group, micro_batch, recompute, data)))
            self.considered += len(held) * len(group.micro_batches) * len(recomputes)

    def find(self, against: float | None) -> None:
        """Price candidates, the ones with the least bound first, until `best` is known."""
        for time, plan, leaf in self._priced():
            if len(self.best) >= self.keep and time.step_s > (self.best[-1].time or time).step_s:
                break
            found = self._found(plan, leaf, time)
            (self.best if _is_fit(found, self.cluster) else self.unfit).append(found)

    def _priced(self) -> Iterator[tuple[StepTime, Plan, Leaf]]:
        """The candidates that may fit, the fastest first."""
        number = count()
        heap: list[tuple[float, int, int, tuple]] = [(row[0], 0, next(number), row[2:]) for row in self.rows]
        heapq.heapify(heap)
        while heap:
            _, stage, _, item = heapq.heappop(heap)
            if stage == 0:
                group, micro_batch, recompute, datas = item
                plan = self.legal.plan(group, micro_batch, recompute, datas[0])
                least = least_s(self.known, plan, self.cluster)
                heapq.heappush(heap, (least or 0.0, 1, next(number), item))
            elif stage == 1:
                group, micro_batch, recompute, datas = item
                for data in datas:
                    plan = self.legal.plan(group, micro_batch, recompute, data)
                    time = step_time_with(self.known, plan, self.cluster, least=True)
                    leaf = group, micro_batch, recompute, data
                    if time is None:
                        self._unpriced(plan, leaf)
                    else:
                        heapq.heappush(heap, (time.step_s, 2, next(number), (plan, leaf)))
            elif stage == 2:
                plan, leaf = item
                time = step_time_with(self.known, plan, self.cluster)
                assert time is not None
                heapq.heappush(heap, (time.step_s, 3, next(number), (time, plan, leaf)))
            else:
                yield item

    def _unpriced(self, plan: Plan, leaf: Leaf) -> None:
        reason = why_unknown(plan, self.cluster)
        self.num_unpriced[reason] += 1
        if reason not in self.unpriced:
            self.unpriced[reason] = self._found(plan, leaf, None)

    def _found(self, plan: Plan, leaf: Leaf, time: StepTime | None) -> Found:
        group, *chosen = leaf
        memory = prediction.heaviest(plan, self.cluster)
        return Found(
            self.legal.space.overrides(group.choice(*chosen)),
            time,
            memory.total,
            cluster_cost.fits(memory, self.cluster),
            time.tokens_per_s_per_gpu * plan.world if time else None,
            "" if time else why_unknown(plan, self.cluster),
        )

    def result(self, against: float | None) -> Search:
        removed = [
            Removed(rule, number, self.legal.examples[rule].what, self.legal.examples[rule].suggestion)
            for rule, number in self.legal.removed.items()
        ]
        best = tuple(sorted(self.best, key=_order))[: self.keep]
        return Search(
            self.legal.space.world, self.legal.space.global_batch, self.considered, self.may_fit, best, None,
            tuple(self.unpriced.values()), dict(self.num_unpriced), tuple(removed), None,
        )  # fmt: skip


def _is_fit(found: Found, cluster: ClusterConfig) -> bool:
    return found.fits == "yes" or not cluster.memory_gb


def _order(one: Found) -> tuple[float, int]:
    """The fastest first; of equally fast ones that which needs least memory."""
    assert one.time is not None
    return one.time.step_s, one.heaviest_bytes


def _most_bytes(cluster: ClusterConfig) -> float:
    """The most bytes of tensors with which a rank fits its device for certain, whatever its communicators need."""
    if not cluster.memory_gb:
        return NEVER
    low, high = 0, round(2 * cluster.memory_gb * device_memory.GIGA)
    while low < high:
        middle = (low + high + 1) // 2
        found = device_memory.beside(Memory(middle, 0, 0, 0), 0 if cluster.context_gb else 1, cluster)
        low, high = (middle, high) if cluster_cost.fits(found, cluster) == "yes" else (low, middle - 1)
    return low
