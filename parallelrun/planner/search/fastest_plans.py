"""`search`: the fastest plans of everything that the user has left open.

Best first: candidates wait in the order of a lower bound of their time, and the first is bounded more closely, then
priced, until those in front have been priced and fit. What is behind them cannot be faster.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config, DataStrategyConfig
from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.contract.classes import data_strategy
from parallelrun.planner.contract.degrees import device_of
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.pieces import router_settings
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import StepModel, StepTime, why_unknown
from parallelrun.planner.resolve import rules
from parallelrun.planner.resolve.default_precision import with_precision
from parallelrun.planner.resolve.resolve_config import spec_of
from parallelrun.planner.search.bounds import Bounds, most_bytes, on_device
from parallelrun.planner.search.first_pass import CandidateRow, FirstPass
from parallelrun.planner.search.fitting_plans import NEVER, Kept
from parallelrun.planner.search.legal import Legal
from parallelrun.planner.search.result import MEMORY, Found, Removed, Search
from parallelrun.planner.search.space import Space

MOST_COUNTED = 400  # plans whose memory and time are computed in full, to count them
MOST_BOUNDED = 20_000  # legal plans whose memory is bounded, to know whether they are so few
MOST_NEAR = 40  # plans that do not fit whose time is computed, the lightest first
MOST_RANKED = 100  # faster plans that are priced beyond those to show, to count them, where a plan is to be ranked
LONG_SEQ = 2**14  # tokens of a sequence from which context parallelism is as plain as another axis


Leaf = tuple[CandidateRow, DataStrategyConfig]


class _Waiting(NamedTuple):
    """A row, or one of its candidates. is_bounded: its bound contains all communication. time: exact."""

    row: CandidateRow
    data: DataStrategyConfig | None = None
    is_bounded: bool = False
    time: StepTime | None = None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection, which takes a fifth of a search: millions of small tuples, and no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def search(
    config: Config,
    user_keys: frozenset[str],
    world: int,
    keep: int = 3,
    *,
    against: float | None = None,
    gpus: int | None = None,
    most_counted: int = MOST_COUNTED,
    simplest: bool = False,
) -> Search:
    """Return the fastest plans on `world` ranks that fit (see `Kept`), and what became of all others.

    config: composed, with the strategy that the user has chosen or the default one. user_keys: the dotted keys that the
    user has set: they hold for all plans. against: seconds of a step of a plan to rank. gpus: GPUs of this host, as
    `resolve` takes it. most_counted: up to so many plans are all priced, to count them. simplest: of the plans that tie
    with the fastest, that with the fewest axes is first. Raises ConfigError where no plan can be listed: an unknown
    model or a bad value.
    """
    space = Space(with_precision(config, gpus)[0], user_keys, world)
    legal = Legal(space, _spec(space), device_of(config, gpus))
    searched = _Searched(legal, space.base.cluster, keep, most_counted, simplest)
    searched.find(against if keep > 1 else None)
    result = searched.result(against)
    legal.clear()
    return result


def _spec(space: Space) -> ModelSpec:
    problems = rules.too_large(space.folded) + rules.check(space.folded)
    spec = spec_of(narrowed(space.folded), problems)
    if spec is not None:
        problems += router_settings.check_model(space.folded, spec.experts) + rules.check_tokens(space.folded, spec)
    if problems or spec is None:
        raise ConfigError(*problems)
    return spec


class _Searched:
    """A search under way."""

    def __init__(
        self, legal: Legal, cluster: ClusterConfig, keep: int, most_counted: int = MOST_COUNTED, simplest: bool = False
    ):
        self.legal, self.cluster = legal, cluster
        self.times = StepModel(cluster)
        self.limit = most_bytes(cluster)
        self.first_pass = FirstPass(legal, Bounds(legal, cluster, self.times), self.limit)
        self.heavy: list[tuple[int, CandidateRow, DataStrategyConfig]] = []  # bytes at least: they do not fit
        self.num_heavy = 0  # plans that do not fit, of those that were looked at
        self._keep, self.fitting = keep, Kept(keep, partial(_complexity, legal.spec.seq) if simplest else None)
        self.unfit: list[Found] = []
        self.unpriced: list[Found] = []
        self.num_unpriced: Counter[str] = Counter()
        is_small = self.first_pass.considered <= MOST_BOUNDED
        self.is_counted = is_small and self.first_pass.may_fit <= most_counted

    def find(self, against: float | None = None) -> None:
        """Price candidates, the ones with the least bound first, until those in front are the best. against: and
        MOST_RANKED more that are faster than that."""
        if self._leaves_all():
            return
        for plan, leaf, time in self._priced(against or 0.0):
            priced = self._found(plan, leaf, time)
            if priced.fits == "yes" or not self.cluster.memory_gb:
                self.fitting.add(leaf[0].shape, time.step_s, priced)
            else:
                self.unfit.append(priced)
                self.num_heavy += 1

    def _leaves_all(self) -> bool:
        """Whether no plan can be priced, for a reason that does not depend on the plan."""
        first, cluster = self.first_pass, self.cluster
        if not any(why_unknown(self._plan(row, row.group.datas[0]), cluster) for row in first.rows[:1]):
            return False
        leaf = next(((row, memory.datas[0][1]) for row in first.rows if (memory := first.memory(row)).fitting), None)
        if leaf is None or not why_unknown(plan := self._plan(*leaf), self.cluster):
            return False
        self._leave(plan, leaf)
        self.num_unpriced[why_unknown(plan, self.cluster)] = first.may_fit
        self.num_heavy = first.considered - first.may_fit
        return True

    def _priced(self, against: float) -> Iterator[tuple[Plan, Leaf, StepTime]]:
        """The candidates that may fit and be kept, the fastest first."""
        number = count()
        heap = [(row.least_s, next(number), _Waiting(row)) for row in self.first_pass.rows]
        heapq.heapify(heap)
        while heap:
            least, _, waiting = heapq.heappop(heap)
            if not self.is_counted and (least >= against or len(self.fitting.all) >= MOST_RANKED):
                if self.fitting.ends(least):
                    return
                if not self.fitting.wants(waiting.row.shape, least):
                    continue
            if waiting.data is not None and waiting.time is not None:
                yield self._plan(waiting.row, waiting.data), (waiting.row, waiting.data), waiting.time
                continue
            for seconds, closer in self._closer(waiting):
                heapq.heappush(heap, (seconds, next(number), closer))

    def _closer(self, waiting: _Waiting) -> list[tuple[float, _Waiting]]:
        """Return the entries that replace `waiting` in the queue, with closer bounds: the candidates of a row,
        or the same candidate with its data communication or its time."""
        row, data = waiting.row, waiting.data
        if data is None:
            entries: list[tuple[float, _Waiting]] = []
            bounds: dict[bool, float] = {}  # by whether weights are sharded: else a schedule takes equally long
            datas, fitting = self.first_pass.memory(row)
            self.num_heavy += len(row.group.datas) - fitting
            for _, data in datas[:fitting]:
                shards = data_strategy(data.kind).shards_weights
                if shards not in bounds:
                    bounds[shards] = self.times.least_s(self._plan(row, data)) or 0.0
                entries.append((bounds[shards], _Waiting(row, data)))
            self.heavy += [(least, row, data) for least, data in datas[fitting:]]
            return entries
        plan = self._plan(row, data)
        if waiting.is_bounded and (least := prediction.least_bytes(plan, self.limit)) > self.limit:
            self.num_heavy += 1
            self.heavy.append((least, row, data))
            return []
        time = self.times.step_time(plan, least=not waiting.is_bounded)
        if time is None:
            self._leave(plan, (row, data))
            return []
        return [(time.step_s, _Waiting(row, data, True, time if waiting.is_bounded else None))]

    def _plan(self, row: CandidateRow, data: DataStrategyConfig) -> Plan:
        return self.legal.plan(row.group, row.micro_batch, row.recompute, data)

    def _leave(self, plan: Plan, leaf: Leaf) -> None:
        """Take down a plan that cannot be priced."""
        reason = why_unknown(plan, self.cluster)
        if reason not in self.num_unpriced:
            self.unpriced.append(self._found(plan, leaf, None))
        self.num_unpriced[reason] += 1

    def _found(self, plan: Plan, leaf: Leaf, time: StepTime | None) -> Found:
        row, data = leaf
        memory = prediction.heaviest(plan, self.cluster)
        return Found(
            self.legal.space.overrides(row.group.choice(row.micro_batch, row.recompute, data)),
            time,
            memory.total,
            cluster_cost.fits(memory, self.cluster),
            time.tokens_per_s_per_gpu * plan.world if time else None,
            "" if time else why_unknown(plan, self.cluster),
        )

    def _nearest(self, best: Found | None) -> Found | None:
        """The plan that misses least of those that do not fit and are faster than the best, of MOST_NEAR."""
        limit = best.time.step_s if best and best.time else NEVER
        faster = [unfit for unfit in self.unfit if unfit.time and unfit.time.step_s < limit]
        nearest = min(faster, key=lambda unfit: unfit.heaviest_bytes, default=None)
        heavy = [(size, number, row, data, False) for number, (size, row, data) in enumerate(self.heavy)]
        heapq.heapify(heavy)
        left = MOST_NEAR
        while heavy and left > 0:
            if nearest and on_device(heavy[0][0], 0, self.cluster).total >= nearest.heaviest_bytes:
                break
            _, number, row, data, is_close = heapq.heappop(heavy)
            if row.least_s >= limit or (self.times.least_s(plan := self._plan(row, data)) or 0.0) >= limit:
                continue
            least = self.times.step_time(plan, least=True)
            if least is None or least.step_s >= limit:
                continue
            if not is_close:
                heapq.heappush(heavy, (prediction.least_bytes(plan, NEVER), number, row, data, True))
                continue
            left -= 1
            time = self.times.step_time(plan)
            if time and time.step_s < limit:
                candidate = self._found(plan, (row, data), time)
                if nearest is None or candidate.heaviest_bytes < nearest.heaviest_bytes:
                    nearest = candidate
        return nearest

    def result(self, against: float | None) -> Search:
        ordered, best = self.fitting.all, tuple(self.fitting.chosen())
        examples, space, considered = self.legal.examples, self.legal.space, self.first_pass.considered
        fitting = considered - self.num_heavy
        is_counted = fitting == len(ordered) + sum(self.num_unpriced.values())
        removed = [
            Removed(rule, number, examples[rule].what, examples[rule].suggestion)
            for rule, number in self.legal.removed.items()
        ]
        nearest = None if best and self._keep == 1 else self._nearest(best[0] if best else None)
        if heavy := considered - fitting:
            removed.append(Removed(MEMORY, heavy, " ".join(nearest.overrides) if nearest else ""))
        return Search(
            space.world, space.global_batch, considered, fitting, best, nearest,
            tuple(self.unpriced), dict(self.num_unpriced), tuple(sorted(removed, key=lambda rule: -rule.candidates)),
            self._rank(ordered, against, is_counted), is_counted, len(ordered),
        )  # fmt: skip

    def _rank(self, ordered: Sequence[Found], against: float | None, is_counted: bool) -> tuple[int, int] | None:
        """(the best rank that is possible, the worst)."""
        if against is None:
            return None
        num_faster = 1 + sum(plan.time.step_s < against for plan in ordered if plan.time)
        if is_counted:
            return num_faster, num_faster
        first = self.first_pass
        may_be_faster = sum(first.memory(row).fitting for row in first.rows if row.least_s < against)
        return num_faster, max(num_faster, min(1 + may_be_faster, first.considered - self.num_heavy))


def _complexity(seq: int, shape: tuple[Any, ...]) -> tuple[bool, int]:
    """Whether sequences of `seq` tokens are split that need not be, then the number of axes."""
    *degrees, _ = shape
    return shape[2] > 1 and seq < LONG_SEQ, sum(degree > 1 for degree in degrees)
