"""Plans of very many ranks cost about what plans of few cost: calls of functions are counted, not seconds."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from parallelrun.planner.predict import prediction
from parallelrun.planner.predict.rank_classes import rank_classes
from parallelrun.planner.predict.traffic import traffic_of
from tests.matrix import every
from tests.plans import tiny_plan

KIND, ALGORITHM, CONTEXT = "strategy.data.kind", "strategy.data.algorithm", "strategy.context.kind"
HOROVOD = {KIND: "horovod"}
EXPERTS = {"model.experts": 4, "ep": 4}
GRID = "strategy.tensor.kind"
PLANS: list[dict[str, Any]] = [
    *({KIND: kind} for kind in ("ddp", "zero1", "zero2", "fsdp", "local_sgd", "diloco")),
    {KIND: "fsdp", "strategy.data.shard": 8},
    {"pp": 4, "micro_batch": 1},
    {"pp": 2, "schedule": "interleaved", "micro_batch": 1},
    {"pp": 4, "schedule": "zero_bubble", "model.layers": 8, "micro_batch": 1},
    *({**HOROVOD, ALGORITHM: name} for name in ("native", "ring", "halving_doubling", "hierarchical", "tree")),
    *({KIND: "ring", "tp": 3, "model.hidden": 12, "model.heads": 3, "model.vocab": 37, ALGORITHM: name}
      for name in ("ring", "hierarchical")),
    {**HOROVOD, "strategy.data.reduction": "adasum"},
    {**HOROVOD, **EXPERTS},
    {**HOROVOD, **EXPERTS, ALGORITHM: "hierarchical", "strategy.data.group_size": 8},
    {KIND: "zero1", **EXPERTS},
    *({"cp": 4, CONTEXT: kind} for kind in ("ring", "allgather", "ulysses")),
    {"cp": 4, CONTEXT: "usp", "strategy.context.ulysses": 2},
    {"cp": 2, KIND: "ring"},
    {"optimizer.name": "muon", KIND: "fsdp", "tp": 2},
    *({GRID: kind, "tp": ranks} for kind, ranks in (("2d", 4), ("2.5d", 8), ("3d", 8))),
    {KIND: "ps", "servers": 2},
    {KIND: "ps", "servers": 2, "tp": 2, "cp": 2},
]  # fmt: skip


SETS = {**HOROVOD, "strategy.data.process_sets": [[0, 2, 4, 6], [1, 3]]}  # everyone else is listed, alone


def plan_of(dp: int, overrides: dict[str, Any]):
    return tiny_plan({"dp": dp, "local_batch": 4, "model.hidden": 64, **overrides})


def num_calls(dp: int, overrides: dict[str, Any]) -> int:
    """The functions that a plan and its traffic and memory call."""
    found = [0]

    def count(frame, event, argument) -> None:
        found[0] += event == "call"

    sys.setprofile(count)
    try:
        plan = plan_of(dp, overrides)
        traffic_of(plan)
        prediction.memories(plan)
    finally:
        sys.setprofile(None)
    return found[0]


@pytest.mark.parametrize("overrides", every(2, PLANS), ids=str)
def test_a_thousand_times_the_ranks_take_hardly_more_calls(overrides):
    num_calls(64, overrides)  # what is kept for all plans
    assert num_calls(65_536, overrides) < 5 * num_calls(64, overrides)


@pytest.mark.parametrize("overrides", [*every(2, (plan for plan in PLANS if "servers" not in plan)), SETS], ids=str)
def test_classes_of_ranks_are_those_of_all_ranks(overrides):
    """Shapes that nothing divides, so that chunks of a tensor differ."""
    dp = 32 if "adasum" in overrides.values() else 24
    plan = plan_of(dp, {"model.vocab": 37, **overrides})
    of_classes: Counter[object] = Counter()
    for rank, count in rank_classes(plan):
        of_classes[tuple(prediction.collectives(plan, rank))] += count
    assert of_classes == Counter(tuple(prediction.collectives(plan, rank)) for rank in range(plan.world))
