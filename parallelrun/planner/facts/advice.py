"""Warnings about a plan, each with a change that avoids it and has been planned to check that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from parallelrun.base.wording import counted, divisors, gib
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed, kinds
from parallelrun.planner.contract.classes import data_strategy, pipeline_schedule
from parallelrun.planner.contract.degrees import shown
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.facts.plan_facts import Facts
from parallelrun.planner.pieces import partition
from parallelrun.planner.pieces.batch import in_whole_rounds
from parallelrun.planner.pieces.hosts import ranks_per_node, stays_in_node
from parallelrun.planner.predict import cluster_cost, prediction, simulate
from parallelrun.planner.predict.simulate import Simulation
from parallelrun.planner.predict.step_time.blocks import EXPERT
from parallelrun.planner.resolve.draft import REFERENCE_SCHEDULE
from parallelrun.planner.resolve.resolve_config import solve
from parallelrun.planner.resolve.suggest import with_adapters, with_value

Change = dict[str, Any]  # key -> the value to type
MOST_CHANGES = 8  # applied one after the other
LARGEST_BUBBLE = 0.15  # of a step's time; a larger one is warned about
LARGEST_EXPOSED = 0.1  # of a step's time, in all-to-alls of experts
MOST_ROUNDS = 64  # of pp microbatches
MOST_SIMULATED = 20_000  # stages by microbatches of a schedule that is tried: a tenth of a second


def warnings(plan: Plan, config: Config, results: Facts) -> list[str]:
    """The plan's own warnings, and those that follow from its cost."""
    cluster, texts = config.cluster, list(plan.warnings)
    memory = results.memories[results.heaviest_pp_rank]
    if cluster_cost.fits(memory, cluster) == "no":
        texts.append(
            f"does not fit: a rank of pp={results.heaviest_pp_rank} needs {gib(memory.total)}, "
            f"{cluster_cost.why_fits(memory, cluster)}; {memory_advice(plan, config)}"
        )
    per_node = ranks_per_node(cluster, plan.world)
    if cluster.nodes and plan.world > cluster.nodes * per_node:
        texts.append(f"{plan.world} ranks, and the cluster has {cluster.nodes} x {per_node} devices")
    if plan.mesh.size("tp") > 1 and not stays_in_node(plan, cluster, "tp"):
        texts.append(f"tp groups of {plan.mesh.size('tp')} reach across hosts of {per_node} devices")
    ep = plan.mesh.size("ep")
    if plan.expert and plan.expert.group_size == 1 and not stays_in_node(plan, cluster, "ep"):
        inner = gcd(ep, max(1, per_node // plan.mesh.size("tp")))
        two_levels = f"; strategy.expert.group_size={inner} sends inside a host first" if 1 < inner < ep else ""
        texts.append(f"ep groups of {ep} reach across hosts of {per_node} devices{two_levels}")
    exposed = results.time.parts.get(EXPERT, 0.0) / results.time.step_s if results.time else 0.0
    if exposed > LARGEST_EXPOSED and not (plan.stack.expert_overlap or plan.pipeline.overlaps_passes):
        hides = f"{plan.stack.name} hides them under parts of a microbatch (strategy.expert.chunks)"
        texts.append(f"{exposed:.0%} of a step waits for all-to-alls; {hides} or another one (schedule=dualpipev)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if plan.device == "cpu" and not cluster.gpus_per_node and plan.world > cores:
        crowd = f"{counted(plan.world, 'rank')} on {counted(cores, 'core')} of this host"
        texts.append(f"{crowd}: step time is no scaling measurement")
    texts += _bubble_warnings(plan, config, results.simulation)
    texts += _schedule_warnings(plan, config, results.simulation.bubble_of_total)
    if config.model.attention_dropout > 0:
        texts.append("attention_dropout > 0: attention is computed explicitly, with s x s scores kept per head")
    return texts


def memory_advice(plan: Plan, config: Config) -> str:
    """The single changes that make the plan fit; else changes that do so together; else the best that was found."""
    typed: Change = {}

    def needed(plan: Plan) -> int:
        return prediction.heaviest(plan, config.cluster).total

    for number in range(MOST_CHANGES):
        tried = [
            ({**typed, **change}, other)
            for change in _smaller(plan, config)
            if (other := _planned(plan, config, {**typed, **change}))
        ]
        enough = [f"{shown(change)} ({gib(needed(other))})" for change, other in tried if _fits(other, config)]
        if enough and not number:
            return f"{' or '.join(enough)} fits"
        change, least = min(tried, key=lambda item: needed(item[1]), default=(typed, plan))
        if needed(least) >= needed(plan):
            break
        typed, plan = change, least
        if _fits(plan, config):
            return f"{shown(typed)} fits ({gib(needed(plan))})"
    if not typed:
        return "none of the changes that were tried needs less"
    return f"{shown(typed)} needs the least that was found, {gib(needed(plan))}"


def _fits(plan: Plan, config: Config) -> bool:
    return cluster_cost.fits(prediction.heaviest(plan, config.cluster), config.cluster) == "yes"


def _smaller(plan: Plan, config: Config) -> list[Change]:
    """The changes that may need less memory and are not in the plan yet."""
    size, batch = plan.mesh.size, plan.batch
    in_samples = config.microbatches is None
    wanted: list[tuple[bool, Change]] = [
        (not plan.runs_again, {"recompute": "full"}),
        (plan.loss_chunks == 1, {"loss_chunks": 8}),
        (plan.recompute == "full" and plan.device == "cuda", {"recompute": "offload"}),
        (not plan.offloads_optimizer and plan.device == "cuda", {"optimizer.offload": "true"}),
        *((True, {key: value}) for key, value in with_adapters(config).items()),
        (batch.micro_batch > 1, {"micro_batch": 1} if in_samples else {"microbatches": batch.replica_batch}),
        (not plan.tensor.sequence_parallel and size("tp") > 1, {"strategy.tensor.sequence_parallel": "true"}),
        *(
            (size("dp") > 1 and plan.data.kind != kind, {"strategy.data.kind": kind})
            for kind in kinds("data")
            if data_strategy(kind).saves_memory
        ),
    ]
    for axis in ("tp", "pp"):  # twice the degree on as many devices, if dp is even
        halved = {"dp": size("dp") // 2} if size("dp") % 2 == 0 else {}
        wanted.append((True, {axis: 2 * size(axis), **halved}))
    return [change for is_open, change in wanted if is_open]


def _planned(plan: Plan, config: Config, change: Change) -> Plan | None:
    """The plan with the same degrees and that change; None if it is not legal. config: of a saved run, too."""
    degrees = {axis: plan.mesh.size(axis) for axis in ("pp", "dp", "tp")}
    changed: Config | None = completed(config)
    for key, value in {**degrees, "world": None, "device": plan.device, **change}.items():
        changed = with_value(changed, key, True if value == "true" else value) if changed else None
    is_other = plan.spec.packed or any(key.startswith("model.") for key in change)
    spec = None if is_other else plan.spec  # of packed documents, stages are cut before these are known
    solved = solve(changed, frozenset(), None, None, True, spec) if changed else None
    return solved if isinstance(solved, Plan) else None


def _bubble_warnings(plan: Plan, config: Config, simulation: Simulation) -> list[str]:
    """A warning about a bubble above LARGEST_BUBBLE, with the number of microbatches that brings it below."""
    bubble = simulation.bubble_of_total
    if plan.mesh.size("pp") == 1 or bubble <= LARGEST_BUBBLE:
        return []
    schedule: Change = {}
    if not plan.pipeline.takes_microbatches:
        schedule = {"schedule": REFERENCE_SCHEDULE}
        plan = replace(plan, pipeline=pipeline_schedule(REFERENCE_SCHEDULE)())
    said, limit = f"the bubble takes {bubble:.0%} of a step", f"{LARGEST_BUBBLE:.0%}"
    # In a steady round the busiest pp rank never waits, so a mean below its share is a bubble that stays.
    if sum(simulation.busy) / len(simulation.busy) <= (1 - LARGEST_BUBBLE) * max(simulation.busy):
        return [f"{said}: the stages are uneven, so more microbatches cannot bring it to {limit}; a lower pp can"]
    # About as many keep the idle time of this schedule: fewer are not tried.
    least = 0.9 * plan.batch.microbatches * bubble / (1 - bubble) * (1 - LARGEST_BUBBLE) / LARGEST_BUBBLE
    for change, microbatches in _more_microbatches(plan, config):
        if microbatches < least:
            continue
        if microbatches * len(plan.stages) > 10 * MOST_SIMULATED:
            break  # so many that nobody trains with them
        left = simulate.of_plan(plan, microbatches).bubble_of_total
        if left <= LARGEST_BUBBLE and _planned(plan, config, {**schedule, **change}):
            return [f"{said}: {shown({**schedule, **change})} brings it to {left:.0%}"]
    return [f"{said}: more microbatches make it smaller"]


def _schedule_warnings(plan: Plan, config: Config, bubble: float) -> list[str]:
    """The schedule with the smallest bubble of the same batch that fits, or does not where this one does not either."""
    pp = plan.mesh.size("pp")
    if pp == 1 or bubble <= LARGEST_BUBBLE:
        return []
    fits = _fits(plan, config)
    candidates: list[tuple[float, Change, Plan]] = []
    size = plan.batch.global_batch
    batch = {} if config.local_batch or config.global_batch == size else {"global_batch": size}  # filled
    for kind in kinds("pipeline"):
        schedule = pipeline_schedule(kind)
        for number in schedule.choices(pp, partition.num_cuttable(plan.spec)):
            if pp * number * plan.batch.microbatches > MOST_SIMULATED:
                continue
            change: Change = {
                "schedule": kind,
                **({"virtual_stages": number} if schedule.takes_virtual_stages else {}),
                **batch,
            }
            other = _planned(plan, config, change)
            if other and other.batch == plan.batch:
                candidates.append((simulate.of_plan(other).bubble_of_total, change, other))
    for left, change, other in sorted(candidates, key=lambda candidate: candidate[0]):
        if left > 0.75 * bubble:
            break
        if _fits(other, config) or not fits:
            return [f"with the same batch, {shown(change)} makes the bubble {left:.0%}"]
    return []


def _more_microbatches(plan: Plan, config: Config) -> Iterator[tuple[Change, int]]:
    """(the change to type, its microbatches), by ascending number: first of the same batch, then of larger ones.

    Changes the keys that the config sets: micro_batch or local_batch if it gives those.
    """
    pp, replica, micro_batch = plan.mesh.size("pp"), plan.batch.replica_batch, plan.batch.micro_batch
    in_samples = config.micro_batch is not None
    for count in divisors(replica):
        if count > plan.batch.microbatches and in_whole_rounds(count, pp):
            yield ({"micro_batch": replica // count} if in_samples else {"microbatches": count}), count
    for count in range(pp * (plan.batch.microbatches // pp + 1), pp * MOST_ROUNDS, pp):
        samples = count * micro_batch
        size = {"local_batch": samples} if config.local_batch else {"global_batch": samples * plan.mesh.size("dp")}
        yield {**size, **({} if in_samples else {"microbatches": count})}, count
