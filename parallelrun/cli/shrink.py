"""`shrink=true`: the smallest plan with the structure of the one that was asked for, and what that changed."""

from __future__ import annotations

import sys
from dataclasses import replace

from parallelrun.config.compose import Composed
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.resolve import resolve
from parallelrun.plan.shrink import shrunk
from parallelrun.plan.structure import Plan

_VERBS = ("verify", "plan")  # those that it is for


def shrunk_plan(composed: Composed, verb: str, world: int | None, sweep: bool = False) -> tuple[Composed, Plan]:
    """The smallest plan with the structure of the one that was asked for. world, sweep: see `resolve`.

    Raises ConfigError.
    """
    if verb not in _VERBS:
        what = f"shrink=true is for {' and '.join(_VERBS)}, and {verb} runs the plan as it is"
        raise ConfigError(Problem(what, "shrink", command="parallelrun verify ... shrink=true"))
    found = shrunk(composed.config, resolve(composed.config, given=composed.given, sweep=sweep))
    if world is not None and world != found.plan.world:
        what = f"the smallest plan has {found.plan.world} ranks, and the launcher has started {world}"
        raise ConfigError(Problem(what, "shrink", command="parallelrun verify ..., without a launcher"))
    print(f"note: shrink: {', '.join(found.sizes)}", file=sys.stderr)
    for name in found.lost:
        print(f"warning: shrink: not kept, because it needs more ranks: {name}", file=sys.stderr)
    return replace(composed, config=found.config, given=frozenset()), found.plan
