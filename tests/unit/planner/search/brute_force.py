"""Every candidate of a space, resolved and priced by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from parallelrun.config.schema.strategy_keys import narrowed
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.model.model_spec import ModelSpec
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import StepTime, step_time
from parallelrun.planner.resolve import resolve_config
from parallelrun.planner.search.space import Choice, Space
from tests.unit.config.test_presets import composed


@dataclass(frozen=True)
class PricedCandidate:
    """A legal candidate. fits: as `cluster_cost.fits`, `yes` where the cluster gives no memory size."""

    choice: Choice
    plan: Plan
    time: StepTime | None
    heaviest_bytes: int
    fits: str


def every_choice(space: Space, spec: ModelSpec) -> Iterator[Choice]:
    """All candidates of a space, legal or not."""
    for pp, dp, cp, tp in space.degrees(spec):
        axes = space.experts(dp, cp, tp, spec), space.tensors(tp), space.pipelines(pp, spec)
        others = space.datas(dp * cp, pp, tp), space.micro_batches(dp, spec), space.recomputes()
        for (ep, expert), tensor, pipeline, data, micro_batch, recompute in product(*axes, *others):
            yield Choice(pp, dp, tp, ep, micro_batch, recompute, data, tensor, pipeline, expert, cp)


def brute_force(words: tuple[str, ...], world: int) -> list[PricedCandidate]:
    found = composed(*words)
    space, problems = Space(found.config, found.given, world), []
    spec = resolve_config.spec_of(narrowed(space.base), problems)
    assert spec is not None, problems
    given = found.given - {"schedule", "layout", "virtual_stages"}
    candidates = []
    for one in every_choice(space, spec):
        plan = resolve_config.solve(space.config(one), given, None, None, True)
        if isinstance(plan, Plan):
            cluster = space.base.cluster
            memory = max(prediction.memories(plan, cluster).values(), key=lambda memory: memory.total)
            fits = cluster_cost.fits(memory, cluster) if cluster.memory_gb else "yes"
            candidates.append(PricedCandidate(one, plan, step_time(plan, cluster), memory.total, fits))
    return candidates
