"""Crossovers: at which link rates, batch and tokens per microbatch another plan becomes the fastest.

A search at other values finds the winner there, bisection finds the value from which it wins, and a search at that
value finds whether no other plan wins sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import attrgetter
from time import monotonic

from parallelrun.config.keys import known_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
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
FARTHEST, DOUBLINGS = 3, 2  # factors of two, of a rate and of a size, within which another plan is looked for
BUDGET_S = 10.0  # a space of 100,000 plans takes seconds to search
NEVER = float("inf")
MARGIN = 0.01  # part by which a plan must be faster to win
RATE_STEPS, LENGTH_STEPS = 4096, 64  # values between the present one and the farthest, among which bisection looks
SHAPE = ("pp", "dp", "cp", "tp", "ep", "layout", "strategy.data.kind")  # a plan that differs in one of these is another

ConfigAt = Callable[[int], Config]  # the configuration at a step between the present value (0) and a farther one


@dataclass(frozen=True)
class Crossover:
    """From `value` of `key` on (down where it is below `now`), `winner` is faster than the best plan.

    Values of SEQ are tokens of a microbatch. hidden: the model's width, by which they can be divided.
    """

    key: str
    now: float
    value: float
    winner: Found
    hidden: int


def crossovers(config: Config, user_keys: frozenset[str], result: Search) -> tuple[list[Crossover], bool]:
    """(where another plan beats the best one of a search, whether all was looked for). config, user_keys: searched.

    Every plan has the recomputation of the best plan, and its microbatch unless the batch changes. No search begins
    after BUDGET_S.
    """
    end, best = monotonic() + BUDGET_S, result.best[0]
    plain = replace(open_keys.base_of(config), global_batch=result.global_batch, local_batch=None)
    user_keys = user_keys - {"strategy", "local_batch"} | {BATCH}
    selected, _ = open_keys.with_choice(plain, user_keys, best)
    plan = _planned(user_keys, best, plain)
    tokens = plan.batch.micro_batch * plan.spec.seq if plan and plan.spec.kind == "tokens" else 0
    rows: list[Crossover] = []
    for key, factor in product(KEYS, (1 / 2, 2)):
        if monotonic() >= end:
            return rows, False
        if key == SEQ and not tokens:
            continue
        fixed = ["recompute"] if key == BATCH or plain.microbatches is not None else ["recompute", "micro_batch"]
        base = replace(plain, **{name: getattr(selected, name) for name in fixed})
        crossover = _first_crossover(base, user_keys | {*fixed}, result, key, factor)
        if crossover and key == SEQ:
            crossover = replace(crossover, now=tokens, value=tokens * crossover.value / crossover.now)
        rows += [crossover] if crossover else []
    return rows, True


def _first_crossover(
    config: Config, user_keys: frozenset[str], result: Search, key: str, factor: float
) -> Crossover | None:
    """The crossover towards `factor` times the present value of a key."""
    first = _Contender(user_keys, result.best[0])
    for at, last in _paths(config, key, factor):
        step, winner = last, _winner(first, user_keys, at(last), result.world, last == 1)
        while winner and last > 1:
            turn = _first_win(first, winner, at, step)
            closer = _winner(first, user_keys, at(turn), result.world) if turn < step else winner
            is_same, winner, step = closer is not None and closer.shape == winner.shape, closer, turn
            if is_same:
                break
        # The search tries cp on long sequences only, so its winner there may be faster at the present length, too.
        if winner and not winner.beats(first, at(0)):
            return Crossover(key, _value(config, key), _value(at(step), key), winner.choice, config.model.hidden)
    return None


def _winner(
    first: _Contender, user_keys: frozenset[str], config: Config, world: int, legal_or_not: bool = False
) -> _Contender | None:
    """The fastest plan of another configuration, if it has another shape than `first` and wins. legal_or_not: it wins,
    too, where `first` is not legal."""
    fastest = search(config, user_keys, world, 1).best
    other = _Contender(user_keys, fastest[0]) if fastest else None
    if other is None or other.shape == first.shape:
        return None
    wins = other.beats(first, config)
    return other if wins or (wins is None and legal_or_not) else None


def _paths(config: Config, key: str, factor: float) -> Iterator[tuple[ConfigAt, int]]:
    """The configurations between a key's value and each farther one that is tried, and the last of their steps."""
    now = _value(config, key)
    if key in LINKS:
        if now:
            least, most = known_keys()[key].plausible or (0.0, NEVER)
            ratio = min(max(now * factor**FARTHEST, least), most) / now
            yield lambda step: with_value(config, key, now * ratio ** (step / RATE_STEPS)), RATE_STEPS
        return
    last = LENGTH_STEPS if key == SEQ else 1
    for doubling in range(1, DOUBLINGS + 1):
        size = now * factor**doubling
        if size >= 1 and size == int(size):
            yield partial(_at_size, config, key, size, last), last


def _at_size(config: Config, key: str, size: float, last: int, step: int) -> Config:
    """`config` at a step of a whole number's way to `size`."""
    now = _value(config, key)
    changed: Config = with_value(config, key, round(now + (size - now) * step / last))
    return changed


class _Contender:
    """A plan of a search at other values."""

    def __init__(self, user_keys: frozenset[str], choice: Found):
        self._user_keys, self.choice = user_keys, choice
        self.shape = [text for text in choice.overrides if text.partition("=")[0] in SHAPE]
        # Of what is varied, only the sizes of model and batch change the plan: the links of the cluster do not.
        self._plans: dict[tuple[int, int | None], tuple[Plan | None, bool]] = {}

    def seconds(self, config: Config) -> float | None:
        """Return the seconds of a step: infinite if the plan does not fit a device, None if it is illegal or not
        predicted."""
        key = config.model.seq, config.global_batch
        if key not in self._plans:
            plan, cluster = _planned(self._user_keys, self.choice, config), config.cluster
            has_room = plan is None or not cluster.memory_gb
            if plan and not has_room:
                has_room = cluster_cost.fits(prediction.heaviest(plan, cluster), cluster) == "yes"
            self._plans[key] = plan, has_room
        plan, has_room = self._plans[key]
        time = step_time(plan, config.cluster) if plan else None
        if time is None:
            return None
        return time.step_s if has_room else NEVER

    def beats(self, other: _Contender, config: Config) -> bool | None:
        """Return whether this plan is faster by MARGIN; None where one of the plans has no time."""
        own, others = self.seconds(config), other.seconds(config)
        return None if own is None or others is None else own * (1 + MARGIN) <= others


def _first_win(first: _Contender, second: _Contender, at: ConfigAt, last: int) -> int:
    """The first of the steps 1 to `last` at which the second plan wins, if it wins from some step on.

    It wins at `last`. Bisection ends early where a step cannot be compared.
    """
    lost = 0
    while last - lost > 1:
        middle = (lost + last) // 2
        wins = second.beats(first, at(middle))
        if wins is None:
            break
        lost, last = (lost, middle) if wins else (middle, last)
    return last


def _planned(user_keys: frozenset[str], choice: Found, config: Config) -> Plan | None:
    """A plan of a search with another configuration; None where it is not legal."""
    solved = solve(*open_keys.with_choice(config, user_keys, choice), None, None, True)
    return solved if isinstance(solved, Plan) else None


def _value(config: Config, key: str) -> float:
    """The number under a dotted key, 0 where it is not set."""
    value = attrgetter(key)(config)
    return value if isinstance(value, (int, float)) else 0
