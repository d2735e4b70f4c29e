"""What to type so that a plan fits its devices: every change is planned before it is named. Torch-free."""

from __future__ import annotations

from typing import Any

from parallelrun.config.schema import Config
from parallelrun.plan import prediction
from parallelrun.plan.cluster_cost import fits
from parallelrun.plan.resolve import solve
from parallelrun.plan.structure import Memory, Plan
from parallelrun.plan.suggest import with_value
from parallelrun.wording import gib

Change = dict[str, Any]
MOST_CHANGES = 8  # one after the other


def heaviest(plan: Plan) -> Memory:
    """Of all ranks, the Memory of the one that holds most."""
    return max(prediction.memories(plan).values(), key=lambda memory: memory.total)


def advice(plan: Plan, config: Config) -> str:
    """The changes of which one alone is enough; else changes that together are; else how far they come."""
    tried = [(change, found) for change in _changes(plan, config) if (found := _planned(plan, config, change))]
    enough = [f"{_typed(change)} ({gib(heaviest(found).total)})" for change, found in tried if _fits(found, config)]
    if enough:
        return f"{' or '.join(enough)} fits"
    typed: Change = {}
    for _ in range(MOST_CHANGES):
        better = [
            (heaviest(found).total, {**typed, **change}, found)
            for change in _changes(plan, config)
            if (found := _planned(plan, config, {**typed, **change}))
        ]
        least = min(better, key=lambda item: item[0], default=None)
        if least is None or least[0] >= heaviest(plan).total:
            break
        _, typed, plan = least
        if _fits(plan, config):
            return f"{_typed(typed)} fits ({gib(heaviest(plan).total)})"
    if not typed:
        return "no change that was tried needs less"
    return f"{_typed(typed)} needs the least that was found, {gib(heaviest(plan).total)}"


def _fits(plan: Plan, config: Config) -> bool:
    return fits(heaviest(plan), config.cluster) == "yes"


def _typed(change: Change) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items())


def _changes(plan: Plan, config: Config) -> list[Change]:
    """What may need less memory and is not so already."""
    size, batch = plan.mesh.size, plan.batch
    in_samples = config.microbatches is None
    wanted: list[tuple[bool, Change]] = [
        (plan.recompute != "full", {"recompute": "full"}),
        (batch.micro_batch > 1, {"micro_batch": 1} if in_samples else {"microbatches": batch.replica_batch}),
        (not plan.tensor.sequence_parallel and size("tp") > 1, {"strategy.tensor.sequence_parallel": "true"}),
        *((size("dp") > 1 and plan.data.kind != kind, {"strategy.data.kind": kind}) for kind in ("zero1", "fsdp")),
    ]
    for axis in ("tp", "pp"):  # on as many devices, where dp has some to give
        halved = {"dp": size("dp") // 2} if size("dp") % 2 == 0 else {}
        wanted.append((True, {axis: 2 * size(axis), **halved}))
    return [change for is_open, change in wanted if is_open]


def _planned(plan: Plan, config: Config, change: Change) -> Plan | None:
    """The plan with that change; None where it is not legal."""
    values = {axis: plan.mesh.size(axis) for axis in ("pp", "dp", "tp")}
    other: Config | None = config
    for key, value in {**values, "world": None, "device": plan.device, **change}.items():
        other = with_value(other, key, True if value == "true" else value) if other else None
    solved = solve(other, frozenset(), None, None, True) if other else None
    return solved if isinstance(solved, Plan) else None
