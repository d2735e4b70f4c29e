"""The torch-free halves of the ways that a plan has chosen, from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from parallelrun import registry
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan import routing
from parallelrun.plan.pipeline_schedule import PipelineSchedule
from parallelrun.plan.strategy import DataWayPlan, ExpertWayPlan, Request, ServerWayPlan, TensorWayPlan
from parallelrun.plan.structure import Plan


@dataclass(frozen=True)
class Strategies:
    """The chosen ways' torch-free halves. expert: None where every rank has all experts (ep=1)."""

    data: DataWayPlan
    tensor: TensorWayPlan
    pipeline: type[PipelineSchedule]
    expert: ExpertWayPlan | None = None


Base = TypeVar("Base")


def pipeline_schedule(kind: str) -> type[PipelineSchedule]:
    """Return the class of a pipeline schedule. Raises KeyError for an unknown kind."""
    return strategy_class("pipeline", kind, PipelineSchedule)


def splits_backward(request: Request) -> bool:
    """Return whether the request's schedule computes input and weight gradients in separate passes."""
    return request.pp > 1 and pipeline_schedule(request.config.strategy.pipeline.kind).splits_backward


def strategy_class(axis: str, kind: str, base: type[Base]) -> type[Base]:
    """Return the subclass of `base` in the registered package's `plan` module whose `kind` is the given one.

    Raises KeyError for an unknown kind, ConfigError for a plug-in without such a class.
    """
    module = registry.load("strategies", f"{axis}.{kind}", "plan")
    for found in vars(module).values():
        if isinstance(found, type) and issubclass(found, base) and getattr(found, "kind", None) == kind:
            return found
    what = f"{module.__name__} has no subclass of {base.__name__} with kind = {kind!r}"
    raise ConfigError(Problem(what, f"strategy.{axis}.kind"))


def load_strategy(axis: str, kind: str) -> Any:
    """The `Way` of an axis (`data` | `tensor` | `pipeline` | `expert`) and kind. KeyError for an unknown kind."""
    return registry.load("strategies", f"{axis}.{kind}", "plan").Way()


def strategies_of(plan: Plan) -> Strategies:
    """The torch-free halves of a plan's ways."""
    return Strategies(
        load_strategy("data", plan.data.kind),
        load_strategy("tensor", plan.tensor.kind),
        type(plan.pipeline),
        load_strategy("expert", plan.expert.kind) if plan.expert.kind != routing.NO_DISPATCHER else None,
    )


def server_strategy_of(plan: Plan) -> ServerWayPlan:
    """The data strategy of a plan with servers."""
    assert plan.servers, f"{plan.data.kind} has no servers"
    return load_strategy("data", plan.data.kind)
