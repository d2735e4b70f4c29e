"""The number of microbatches that makes a pipeline's bubble small enough. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from parallelrun.config.schema import Config
from parallelrun.plan import simulate
from parallelrun.plan.batch import in_whole_rounds
from parallelrun.plan.load import pipeline_schedule
from parallelrun.plan.resolve import REFERENCE_SCHEDULE, solve
from parallelrun.plan.simulate import Simulation
from parallelrun.plan.structure import Plan
from parallelrun.wording import divisors

WARNED = 0.15  # of a step's time


def warnings(plan: Plan, config: Config, simulation: Simulation) -> list[str]:
    """A sentence on a bubble above WARNED, with what to type to bring it below."""
    bubble = simulation.bubble_of_total
    if plan.mesh.size("pp") == 1 or bubble <= WARNED:
        return []
    schedule: dict[str, Any] = {}
    if not plan.pipeline.takes_microbatches:
        schedule = {"schedule": REFERENCE_SCHEDULE}
        plan = replace(plan, pipeline=pipeline_schedule(REFERENCE_SCHEDULE)())
    said = f"the bubble is {bubble:.0%} of a step"
    # In a steady round the busiest coordinate never waits, so a mean below its share is a bubble that stays.
    uneven = sum(simulation.busy) / len(simulation.busy) <= (1 - WARNED) * max(simulation.busy)
    enough = None if uneven else _enough(plan)
    if enough is None:
        return [f"{said}: the stages are uneven, no number of microbatches makes it {WARNED:.0%}; a lower pp does"]
    for numbers, microbatches in _numbers(plan, config, enough):
        left = _simulated(plan, microbatches).bubble_of_total
        if left <= WARNED and _is_legal(config, plan, {**schedule, **numbers}):
            typed = " ".join(f"{key}={value}" for key, value in {**schedule, **numbers}.items())
            return [f"{said}: {typed} makes it {left:.0%}"]
    return [f"{said}: {enough} microbatches or more make it at most {WARNED:.0%}"]


def _simulated(plan: Plan, microbatches: int) -> Simulation:
    batch = replace(plan.batch, microbatches=microbatches)
    return simulate.of_plan(replace(plan, batch=batch))


def _enough(plan: Plan) -> int | None:
    """The fewest rounds of pp microbatches whose bubble is at most WARNED, in microbatches; None where none are enough.

    Every further round adds the same time to a step and the same work to a coordinate, so two lengths say the rest;
    only of a few rounds this is not true.
    """
    pp = plan.mesh.size("pp")
    few, more = _simulated(plan, 4 * pp), _simulated(plan, 5 * pp)
    round_time = (1 - WARNED) * (more.makespan - few.makespan)
    gained = few.ideal / 4 - round_time  # of work in a round over what it may take
    if gained <= 0:
        return None
    enough = pp * max(1, ceil(((1 - WARNED) * few.makespan - 4 * round_time) / gained - 1e-9))
    while _simulated(plan, enough).bubble_of_total > WARNED:
        enough += pp
    return enough


def _numbers(plan: Plan, config: Config, enough: int) -> list[tuple[dict[str, Any], int]]:
    """(what to type, its microbatches), of at least `enough`: first of the same batch, then of a larger one.

    In the words of the config: where it gives micro_batch or local_batch, those change.
    """
    pp, replica, micro_batch = plan.mesh.size("pp"), plan.batch.replica_batch, plan.batch.micro_batch
    counts = [m for m in divisors(replica) if m >= enough and in_whole_rounds(m, pp)]
    in_samples = config.micro_batch is not None
    same = [({"micro_batch": replica // m} if in_samples else {"microbatches": m}, m) for m in counts]
    larger = enough * micro_batch
    size = {"local_batch": larger} if config.local_batch else {"global_batch": larger * plan.mesh.size("dp")}
    return [*same, ({**size, **({} if in_samples else {"microbatches": enough})}, enough)]


def _is_legal(config: Config, plan: Plan, typed: dict[str, Any]) -> bool:
    degrees: dict[str, Any] = {axis: plan.mesh.size(axis) for axis in ("pp", "dp", "tp")}
    changed = replace(config, **{**degrees, "world": None, "device": plan.device, **typed})
    return isinstance(solve(changed, frozenset(), None, None, True), Plan)
