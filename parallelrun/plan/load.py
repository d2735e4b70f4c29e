"""The torch-free halves of the ways that a plan has chosen, from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun import registry
from parallelrun.plan import routing
from parallelrun.plan.strategy import DataWayPlan, ExpertWayPlan, PipelineWayPlan, ServerWayPlan, TensorWayPlan
from parallelrun.plan.structure import Plan


@dataclass(frozen=True)
class Strategies:
    """The chosen ways' torch-free halves. expert: None where every rank has all experts (ep=1)."""

    data: DataWayPlan
    tensor: TensorWayPlan
    pipeline: PipelineWayPlan
    expert: ExpertWayPlan | None = None


def load_strategy(axis: str, kind: str) -> Any:
    """The `Way` of an axis (`data` | `tensor` | `pipeline` | `expert`) and kind. KeyError for an unknown kind."""
    return registry.load("strategies", f"{axis}.{kind}", "plan").Way()


def strategies_of(plan: Plan) -> Strategies:
    """The torch-free halves of a plan's ways."""
    return Strategies(
        load_strategy("data", plan.data.kind),
        load_strategy("tensor", plan.tensor.kind),
        load_strategy("pipeline", plan.pipeline.kind),
        load_strategy("expert", plan.expert.kind) if plan.expert.kind != routing.NO_DISPATCHER else None,
    )


def server_strategy_of(plan: Plan) -> ServerWayPlan:
    """The data strategy of a plan with servers."""
    assert plan.servers, f"{plan.data.kind} has no servers"
    return load_strategy("data", plan.data.kind)
