"""The plan of a composed configuration: as it is, the fastest of a search, shrunk, or that of a run started again."""

from __future__ import annotations

from dataclasses import replace

from parallelrun.base import elapsed
from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import print_note
from parallelrun.config.compose import Composed
from parallelrun.config.keys import GROUPS, known_keys
from parallelrun.launch.host.environment import visible_gpus
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.planner.resolve.rules import DEGREES
from parallelrun.planner.search import open_keys

_SHRINKING = ("verify", "plan")  # the verbs that `shrink=true` is for


def planned(
    composed: Composed, verb: str, world: int | None, *, quiet: bool = False, sweep: bool = False
) -> tuple[Composed, Plan]:
    """The plan, and the configuration with what a search or `shrink=true` has chosen. Raises ConfigError.

    world: the number of ranks that another launcher has started. quiet: do not print what a search has chosen. sweep:
    see `resolve`.
    """
    if open_keys.is_open(composed.config, composed.given):
        from parallelrun.cli import search

        composed = search.with_winner(composed, world, quiet)
    if composed.config.shrink:
        return _shrunk(composed, verb, world, sweep)
    try:
        with elapsed.shown("planning"):  # a module of the user's own may import much
            plan = resolve(composed.config, given=composed.given, world=world, gpus=visible_gpus(), sweep=sweep)
    except ConfigError as error:
        error.problems = tuple(_located(problem, composed.given) for problem in error.problems)
        raise
    precision = replace(composed.config.precision, name=plan.precision.name)
    composed = replace(composed, config=replace(composed.config, precision=precision))
    return _readable(composed, plan, world) if verb == "explain" else (composed, plan)


def _located(problem: Problem, user_keys: frozenset[str]) -> Problem:
    """The problem at a key that the user has typed: its own, or the one that has filled it; else nowhere."""
    where = problem.where
    if where in user_keys or where not in {*known_keys(), *GROUPS}:
        return problem
    short = {"strategy.pipeline.kind": "schedule", "strategy.tensor.kind": "layout"}.get(where, where.split(".")[-1])
    sources = ("world", "strategy") if where in DEGREES else (short, where.partition(".")[0])
    return replace(problem, where=next((key for key in sources if key in user_keys), ""))


def _readable(composed: Composed, plan: Plan, world: int | None) -> tuple[Composed, Plan]:
    """The plan with about as many microbatches as pp ranks, unless the user asked for a number: its schedule and
    messages can be read."""
    config, number = composed.config, plan.mesh.size("pp")
    if number == 1 or plan.batch.microbatches <= number or config.microbatches or config.micro_batch:
        return composed, plan
    for few in range(number, min(2 * number, plan.batch.microbatches)):
        try:
            readable = replace(config, microbatches=few)
            plan_shown = resolve(readable, given=composed.given | {"microbatches"}, world=world, gpus=visible_gpus())
        except ConfigError:  # the batch does not divide
            continue
        print_note(f"note: {few} microbatches are shown; a run has microbatches={plan.batch.microbatches}")
        return replace(composed, config=readable), plan_shown
    return composed, plan


def restarted(composed: Composed, world: int | None) -> tuple[Composed, Plan] | None:
    """The configuration and plan with which a run goes on that torchrun has started again; None for any other."""
    if world is None or composed.config.verb != "run":
        return None
    from parallelrun.launch.entry import reattach

    reattached = reattach.planned(composed.config, world)
    return (replace(composed, config=reattached[0]), reattached[1]) if reattached else None


def _shrunk(composed: Composed, verb: str, world: int | None, sweep: bool) -> tuple[Composed, Plan]:
    """The smallest plan with the structure of the one that was asked for."""
    from parallelrun.planner.resolve.shrink import shrunk

    if verb not in _SHRINKING:
        cause = f"shrink=true is for {' and '.join(_SHRINKING)}, and {verb} runs the plan as it is"
        raise ConfigError(Problem(cause, "shrink", command="parallelrun verify ... shrink=true"))
    smaller = shrunk(composed.config, resolve(composed.config, given=composed.given, sweep=sweep))
    if world is not None and world != smaller.plan.world:
        cause = f"the smallest plan has {smaller.plan.world} ranks, and the launcher has started {world}"
        raise ConfigError(Problem(cause, "shrink", command="parallelrun verify ..., without a launcher"))
    print_note(f"note: shrink: {', '.join(smaller.sizes)}")
    for name in smaller.lost:
        print_note(f"warning: shrink: not kept, because it needs more ranks: {name}")
    return replace(composed, config=smaller.config, given=frozenset()), smaller.plan
