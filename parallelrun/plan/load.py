"""The torch-free halves of the ways that a plan has chosen, from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun import registry
from parallelrun.plan import routing
from parallelrun.plan.structure import Plan
from parallelrun.plan.ways import DataWayPlan, ExpertWayPlan, PipelineWayPlan, ServerWayPlan, TensorWayPlan


@dataclass(frozen=True)
class Ways:
    """The chosen ways' torch-free halves. expert: None where every rank has all experts (ep=1)."""

    data: DataWayPlan
    tensor: TensorWayPlan
    pipeline: PipelineWayPlan
    expert: ExpertWayPlan | None = None


def load_way(axis: str, kind: str) -> Any:
    """The `Way` of an axis (`data` | `tensor` | `pipeline` | `expert`) and kind. KeyError for an unknown kind."""
    return registry.load("strategies", f"{axis}.{kind}", "plan").Way()


def ways_of(plan: Plan) -> Ways:
    """The torch-free halves of a plan's ways."""
    return Ways(
        load_way("data", plan.data.kind),
        load_way("tensor", plan.tensor.kind),
        load_way("pipeline", plan.pipeline.kind),
        load_way("expert", plan.expert.kind) if plan.expert.kind != routing.NO_WAY else None,
    )


def server_way_of(plan: Plan) -> ServerWayPlan:
    """The data way of a plan with servers."""
    assert plan.servers, f"{plan.data.kind} has no servers"
    return load_way("data", plan.data.kind)
