"""`elastic=true`: the plan with which a run goes on when ranks are gone. dp shrinks first.

The global batch stays, by more microbatches, so that the order of samples and the loss are those of the first plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from parallelrun.base.errors import ConfigError
from parallelrun.base.wording import divisors
from parallelrun.config.continued import continued
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.freeze import filled
from parallelrun.planner.resolve.resolve_config import resolve

_OF_WORLD = ("dp", "cp", "tp", "pp")
_SIZES = (*_OF_WORLD, "ep")
_GIVEN = frozenset({*_SIZES, "gpus"})


def least_world(config: Config) -> int:
    """Return the fewest ranks with which an elastic run goes on."""
    return config.min_world or 1


def fitting(requested: Config, saved: Config, plan: Plan, most: int, exact: bool = False) -> tuple[Config, Plan] | None:
    """Return the configuration, with what `resolve` chose, and the plan with at most `most` ranks; None if none fits.

    requested: the user's configuration; saved: the one that the ranks have started from; plan: theirs. exact: the plan
    must have `most` ranks, because a launcher has started them. Degrees that have grown are tried for `exact` alone.
    """
    for sizes in _candidates(plan, most, least_world(requested), exact):
        for micro_batch in dict.fromkeys(
            (plan.batch.micro_batch, requested.micro_batch)
        ):  # the same memory, if possible
            new = replace(requested, world=None, gpus=None, resume=saved.resume, micro_batch=micro_batch, **sizes)
            try:
                config = continued(new, _GIVEN, saved)
                plan_found = resolve(config, world=most if exact else None)
            except ConfigError:
                continue
            return filled(config, plan_found), plan_found
    return None


def _candidates(plan: Plan, most: int, least: int, exact: bool) -> Iterator[dict[str, Any]]:
    """Yield degrees, the best first: another dp with the same other axes, the largest first; then fewer changes."""
    now = {axis: plan.degrees[axis] for axis in _SIZES}
    rest = prod(now[axis] for axis in _OF_WORLD) // now["dp"]
    spanned = now["cp"] * (now["tp"] if plan.ep_spans_tp else 1)

    def fits(sizes: Mapping[str, int]) -> bool:
        world = prod(sizes[axis] for axis in _OF_WORLD) + plan.servers
        return world == most if exact else least <= world <= most

    for dp in range((most - plan.servers) // rest, 0, -1):
        for ep in reversed(divisors(now["ep"])):
            if fits(sizes := {**now, "dp": dp, "ep": ep}) and dp * spanned % ep == 0:
                yield sizes
    others = [axis for axis in _SIZES if axis != "dp" and now[axis] > 1]
    smaller = [dict(zip(others, chosen)) for chosen in product(*(divisors(now[axis]) for axis in others))]
    candidates = []
    for changes in smaller:
        sizes = {**now, **changes}
        ranks = prod(sizes[axis] for axis in _OF_WORLD) // sizes["dp"]
        if any(sizes[axis] != now[axis] for axis in ("cp", "tp", "pp")):
            candidates += [{**sizes, "dp": dp} for dp in range((most - plan.servers) // ranks, 0, -1)]

    def cost(sizes: Mapping[str, int]) -> tuple[int, int, int]:
        world = prod(sizes[axis] for axis in _OF_WORLD)
        changed = sum(sizes[axis] != now[axis] for axis in _SIZES)
        return -world, changed, -sizes["dp"]

    yield from sorted(filter(fits, candidates), key=cost)
