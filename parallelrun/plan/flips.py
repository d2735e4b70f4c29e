"""Where another plan would win: at which link rates, batch and sequence length the answer of a search changes.

The model itself is asked: a search at other values finds who wins there, and bisection finds from where on. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic

from parallelrun.config.keys import known_keys
from parallelrun.config.schema import Config
from parallelrun.plan import chosen
from parallelrun.plan.resolve import solve
from parallelrun.plan.search.result import Found, Search
from parallelrun.plan.search.search import search
from parallelrun.plan.step_time.step import step_time
from parallelrun.plan.structure import Plan
from parallelrun.plan.suggest import with_value

LINKS = ("cluster.inter_gb_s", "cluster.intra_gb_s")
SIZES = ("global_batch", "model.seq")
FARTHEST, STEPS = 3, 2  # factors of two, of a rate and of a size, within which another plan is looked for
HELD = ("recompute",)
BUDGET_S = 10.0  # a space of 100,000 plans takes seconds to search
BISECTIONS = 12
SHAPE = ("pp", "dp", "tp", "ep", "layout", "strategy.data.kind")  # a plan that differs in one of these is another


@dataclass(frozen=True)
class Flip:
    """From `value` of `key` on (down where it is below `now`), `winner` is faster than the best plan."""

    key: str
    now: float
    value: float
    winner: Found


def flips(config: Config, given: frozenset[str], found: Search) -> tuple[list[Flip], bool]:
    """(where another plan beats the best one of a search, whether all was looked for). config, given: as searched with.

    Recomputation is held as in the best plan, and for links its microbatch too. No search begins after BUDGET_S.
    """
    end, world, best = monotonic() + BUDGET_S, found.world, found.best[0]
    plain = replace(chosen.base_of(config), global_batch=found.global_batch, local_batch=None)
    given = given - {"strategy", "local_batch"} | {"global_batch"}
    flipped = []
    for key, factor in product((*LINKS, *SIZES), (1 / 2, 2)):
        held = (*HELD, "micro_batch") if key in LINKS else HELD
        base, keys = _holding(plain, given, best, held)
        if monotonic() < end:
            look = _of_link if key in LINKS else _of_size
            flipped.append(look(base, keys, world, best, key, factor))
    all_done = len(flipped) == 2 * len((*LINKS, *SIZES))
    return [one for one in flipped if one is not None], all_done


def _holding(
    config: Config, given: frozenset[str], best: Found, keys: tuple[str, ...]
) -> tuple[Config, frozenset[str]]:
    """The configuration in which every plan has the best one's values of some keys."""
    chosen_config, _ = chosen.with_choice(config, given, best)
    if "micro_batch" in keys and config.microbatches is not None:
        keys = HELD
    return replace(config, **{key: getattr(chosen_config, key) for key in keys}), given | {*keys}


def _of_link(config: Config, given: frozenset[str], world: int, best: Found, key: str, factor: float) -> Flip | None:
    """The rate at which another plan begins to win, towards `factor` times the rate or more; None if none does."""
    now = _value(config, key)
    least, most = known_keys()[key].plausible or (0.0, float("inf"))
    farthest = min(max((now or 0) * factor**FARTHEST, least), most)
    far = with_value(config, key, farthest) if now else None
    other = _other(far, given, world, best) if far else None
    plans = [_plan(config, given, one) for one in (best, other) if one]
    if other is None or len(plans) < 2 or None in plans or now is None:
        return None
    near, end = now, farthest
    for _ in range(BISECTIONS):
        middle = (near * end) ** 0.5
        ours, theirs = (_seconds(plan, with_value(config, key, middle)) for plan in plans)
        near, end = (near, middle) if theirs < ours else (middle, end)
    return Flip(key, now, end, other)


def _of_size(config: Config, given: frozenset[str], world: int, best: Found, key: str, factor: float) -> Flip | None:
    """The first of a few sizes, each `factor` of the one before, at which another plan wins; None if none does."""
    now = _value(config, key)
    for size in _sizes(now, factor):
        far = with_value(config, key, size)
        other = _other(far, given | {key}, world, best) if far else None
        if other:
            return Flip(key, now or 0, size, other)
    return None


def _sizes(now: float | None, factor: float) -> Iterator[int]:
    for step in range(1, STEPS + 1):
        size = (now or 0) * factor**step
        if size >= 1 and size == int(size):
            yield int(size)


def _other(config: Config, given: frozenset[str], world: int, best: Found) -> Found | None:
    """The plan that wins with this configuration, if it is another one."""
    found = search(config, given, world, 1).best
    return found[0] if found and _shape(found[0]) != _shape(best) else None


def _shape(found: Found) -> list[str]:
    return [text for text in found.overrides if text.partition("=")[0] in SHAPE]


def _plan(config: Config, given: frozenset[str], found: Found) -> Plan | None:
    changed, keys = chosen.with_choice(config, given, found)
    solved = solve(changed, keys, None, None, True)
    return solved if isinstance(solved, Plan) else None


def _seconds(plan: Plan | None, config: Config) -> float:
    time = step_time(plan, config.cluster) if plan else None
    return time.step_s if time else float("inf")


def _value(config: Config, key: str) -> float | None:
    """The number under a dotted key, None where it is not set."""
    node: object = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node if isinstance(node, (int, float)) else None
