"""Where another plan would win: at which link rates, batch and tokens per microbatch the answer of a search changes.

A search at other values finds the winner there, and bisection finds the value from which it wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from time import monotonic
from typing import Any

from parallelrun.config.keys import known_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import step_time
from parallelrun.planner.resolve.resolve_config import solve
from parallelrun.planner.resolve.suggest import with_value
from parallelrun.planner.search import open_keys
from parallelrun.planner.search.fastest_plans import search
from parallelrun.planner.search.result import Found, Search

LINKS = ("cluster.inter_gb_s", "cluster.intra_gb_s")
BATCH, SEQ = "global_batch", "model.seq"  # SEQ: at equal microbatches, so that it scales their tokens
KEYS = (SEQ, *LINKS, BATCH)
FARTHEST, STEPS = 3, 2  # factors of two, of a rate and of a size, within which another plan is looked for
HELD = ("recompute",)
BUDGET_S = 10.0  # a space of 100,000 plans takes seconds to search
NEVER = float("inf")
RATES, LENGTHS = 4096, 64  # values between the one that is given and the farthest, among which bisection looks
SHAPE = ("pp", "dp", "cp", "tp", "ep", "layout", "strategy.data.kind")  # a plan that differs in one of these is another


@dataclass(frozen=True)
class Flip:
    """From `value` of `key` on (down where it is below `now`), `winner` is faster than the best plan.

    winner: None for the plan that the user has named. Values of SEQ are tokens of a microbatch; hidden is the model's
    width, by which they can be divided. least, most: the tokens of a microbatch from or up to which that holds, where
    it does not hold at any.
    """

    key: str
    now: float
    value: float
    winner: Found | None
    hidden: int
    tokens: float
    least: float | None = None
    most: float | None = None


def flips(config: Config, user_keys: frozenset[str], result: Search) -> tuple[list[Flip], bool]:
    """(where another plan beats the best one of a search, whether all was looked for). config, user_keys: searched.

    Every plan has the recomputation of the best plan, and its microbatch unless the batch changes. No search begins
    after BUDGET_S.
    """
    end, best = monotonic() + BUDGET_S, result.best[0]
    plain = replace(open_keys.base_of(config), global_batch=result.global_batch, local_batch=None)
    user_keys = user_keys - {"strategy", "local_batch"} | {BATCH}
    plan = _planned(user_keys, best, plain)
    flipped: list[Flip] = []
    for key, factor in product(KEYS, (1 / 2, 2)):
        if monotonic() >= end:
            return flipped, False
        base, keys = _holding(plain, user_keys, best, HELD if key == BATCH else (*HELD, "micro_batch"))
        look = {BATCH: _of_batch, SEQ: _of_tokens}.get(key, _of_link)
        flipped += look(_Ground(base, keys, result.world, best, plan), key, factor)
    return flipped, True


def flips_of(plan: Plan, config: Config, result: Search, opened: Config) -> list[Flip]:
    """Where a plan that the user has named would be faster than the best one of a search.

    config: of the plan. result: a search with `opened`, which leaves open what the plan chooses.
    """
    pinned: dict[str, Any] = {axis: plan.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")}
    pinned |= {"world": None, "device": plan.device, "microbatches": None, "micro_batch": plan.batch.micro_batch}
    pinned |= {BATCH: plan.batch.global_batch, "local_batch": None}
    named = Contender(lambda changed: _solved(changed, frozenset()))
    best = Contender(lambda changed: _planned(frozenset(), result.best[0], replace(opened, model=changed.model)))
    ground, contest = _Ground(replace(config, **pinned), frozenset(), plan.world, None, plan), Contest(best, named)
    flipped = []
    for key, factor in product((*LINKS, SEQ), (1 / 2, 2)):
        won = ((at, last) for at, last in ground.ways(key, factor) if contest.is_won(at(last)))
        flipped += [ground.flip(key, at(contest.edge(at, last)), None) for at, last in islice(won, 1)]
    return flipped


class Contender:
    """A plan at other values. planned: returns it with a configuration, or None where it is not legal."""

    def __init__(self, planned: Callable[[Config], Plan | None]):
        self._planned = planned
        self._known: dict[object, tuple[Plan | None, bool]] = {}

    def seconds(self, config: Config) -> float | None:
        """Return the seconds of a step: infinite if the plan does not fit a device, None if it is illegal or not
        predicted."""
        # Of what is varied, only the sizes of model and batch change the plan: the links of the cluster do not.
        key = config.model.seq, config.global_batch
        plan, is_fit = once(self._known, key, lambda: self._plan(config))
        time = step_time(plan, config.cluster) if plan else None
        if time is None:
            return None
        return time.step_s if is_fit else NEVER

    def _plan(self, config: Config) -> tuple[Plan | None, bool]:
        plan, cluster = self._planned(config), config.cluster
        if plan is None or not cluster.memory_gb:
            return plan, True
        return plan, cluster_cost.fits(prediction.heaviest(plan, cluster), cluster) == "yes"


@dataclass(frozen=True)
class Contest:
    """Whether the second plan beats the first."""

    first: Contender
    second: Contender

    def is_won(self, config: Config) -> bool | None:
        """None where one of the plans cannot be compared."""
        first, second = self.first.seconds(config), self.second.seconds(config)
        return None if first is None or second is None else second < first

    def edge(self, at: Callable[[int], Config], last: int) -> int:
        """The first of the steps 1 to `last` at which the second plan wins, if it wins from some step on.

        It is known to win at `last`. at: returns the configuration at a step. Bisection ends early where a step cannot
        be compared.
        """
        lost = 0
        while last - lost > 1:
            middle = (lost + last) // 2
            won = self.is_won(at(middle))
            if won is None:
                break
            lost, last = (lost, middle) if won else (middle, last)
        return last


Way = tuple[Callable[[int], Config], int]  # the configuration at a step, and the last step


@dataclass(frozen=True)
class _Ground:
    """The basis of a comparison. best: the best plan of a search; plan: the same, or the plan that the user names."""

    config: Config
    given: frozenset[str]
    world: int
    best: Found | None
    plan: Plan | None

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch of the plan; 0 for a model of images."""
        return self.plan.batch.micro_batch * self.plan.spec.seq if self.plan and self.plan.spec.kind == "tokens" else 0

    def ways(self, key: str, factor: float, there: Config | None = None) -> Iterator[Way]:
        """The values of a rate up to the farthest, or of a length up to each that is tried, from `there` on."""
        config = there or self.config
        now = _value(config, key)
        if key == SEQ:
            for size in _sizes(now, factor) if self.tokens else ():
                yield partial(_at_length, config, size), LENGTHS
        elif now:
            least, most = known_keys()[key].plausible or (0.0, float("inf"))
            ratio = min(max(now * factor**FARTHEST, least), most) / now
            yield lambda step: with_value(config, key, now * ratio ** (step / RATES)), RATES

    def flip(self, key: str, there: Config, winner: Found | None, **bounds: float) -> Flip:
        """The flip between the configuration and another one."""
        now, value = _value(self.config, key) or 0, _value(there, key) or 0
        if key == SEQ:
            now, value = self.tokens, self.tokens * value / now
        return Flip(key, now, value, winner, self.config.model.hidden, self.tokens, **bounds)

    def contest(self, winner: Found) -> Contest:
        assert self.best is not None
        first, second = (partial(_planned, self.given, plan) for plan in (self.best, winner))
        return Contest(Contender(first), Contender(second))


def _at_length(config: Config, far: int, step: int) -> Config:
    """Return `config` with a sequence length between its own and `far`, which is the last of LENGTHS steps."""
    now = config.model.seq
    return replace(config, model=replace(config.model, seq=round(now + (far - now) * step / LENGTHS)))


def _of_link(ground: _Ground, key: str, factor: float) -> list[Flip]:
    """The rate at which another plan begins to win, towards `factor` times the rate or more."""
    for at, last in ground.ways(key, factor):
        other = _other(ground, at(last))
        if other and (contest := ground.contest(other)).is_won(at(last)):
            step = contest.edge(at, last)
            return [ground.flip(key, at(step), other), *_bounded(ground, key, at((step + last) // 2), contest, other)]
    return []


def _bounded(ground: _Ground, key: str, there: Config, contest: Contest, winner: Found) -> list[Flip]:
    """The same plan wins `there`, at another rate, only with enough tokens in a microbatch, or with few enough."""
    for factor, name in ((1 / 2, "least"), (2, "most")):
        for at, last in ground.ways(SEQ, factor, there):
            if contest.is_won(at(last)) is False:
                lost = Contest(contest.second, contest.first).edge(at, last)
                shortest = at(lost - 1)  # the last length at which it wins
                if contest.is_won(shortest):
                    tokens = ground.tokens * shortest.model.seq / ground.config.model.seq
                    return [ground.flip(key, there, winner, **{name: tokens})]
    return []


def _of_tokens(ground: _Ground, key: str, factor: float) -> list[Flip]:
    """The tokens per microbatch at which another plan begins to win."""
    for at, last in ground.ways(key, factor):
        other = _other(ground, at(last))
        if other and (contest := ground.contest(other)).is_won(at(last)) and not contest.is_won(at(0)):
            return [ground.flip(key, at(contest.edge(at, last)), other)]  # the search tries cp on long sequences only
    return []


def _of_batch(ground: _Ground, key: str, factor: float) -> list[Flip]:
    """The first of a few sizes, each `factor` of the one before, at which another plan wins."""
    for size in _sizes(_value(ground.config, key), factor):
        far = replace(ground.config, global_batch=size)
        other = _other(ground, far)
        if other:
            return [ground.flip(key, far, other)]
    return []


def _sizes(now: float | None, factor: float) -> Iterator[int]:
    for step in range(1, STEPS + 1):
        size = (now or 0) * factor**step
        if size >= 1 and size == int(size):
            yield int(size)


def _holding(
    config: Config, user_keys: frozenset[str], best: Found, keys: tuple[str, ...]
) -> tuple[Config, frozenset[str]]:
    """The configuration in which every plan has the best one's values of some keys."""
    chosen_config, _ = open_keys.with_choice(config, user_keys, best)
    if "micro_batch" in keys and config.microbatches is not None:
        keys = HELD
    return replace(config, **{key: getattr(chosen_config, key) for key in keys}), user_keys | {*keys}


def _other(ground: _Ground, there: Config) -> Found | None:
    """The plan that wins with another configuration, if it is another one."""
    fastest = search(there, ground.given, ground.world, 1).best
    return fastest[0] if fastest and ground.best and _shape(fastest[0]) != _shape(ground.best) else None


def _shape(plan: Found) -> list[str]:
    return [text for text in plan.overrides if text.partition("=")[0] in SHAPE]


def _planned(user_keys: frozenset[str], choice: Found, config: Config) -> Plan | None:
    return _solved(*open_keys.with_choice(config, user_keys, choice))


def _solved(config: Config, user_keys: frozenset[str]) -> Plan | None:
    solved = solve(config, user_keys, None, None, True)
    return solved if isinstance(solved, Plan) else None


def _value(config: Config, key: str) -> float | None:
    """The number under a dotted key, None where it is not set."""
    node: object = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node if isinstance(node, (int, float)) else None
