"""The strategies that a plan has chosen, from the registry. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun import registry
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan import routing
from parallelrun.plan.strategy import DataWayPlan, ExpertWayPlan, PipelineWayPlan, ServerWayPlan
from parallelrun.plan.structure import Plan
from parallelrun.plan.tensor_strategy import TensorStrategy


@dataclass(frozen=True)
class Strategies:
    """The chosen ways' torch-free halves. expert: None where every rank has all experts (ep=1)."""

    data: DataWayPlan
    tensor: type[TensorStrategy]
    pipeline: PipelineWayPlan
    expert: ExpertWayPlan | None = None


def load_strategy(axis: str, kind: str) -> Any:
    """The `Way` of an axis (`data` | `pipeline` | `expert`) and kind. KeyError for an unknown kind."""
    return registry.load("strategies", f"{axis}.{kind}", "plan").Way()


def tensor_strategy(kind: str) -> type[TensorStrategy]:
    """Return the class of a tensor strategy. Raises KeyError for an unknown kind."""
    module = registry.load("strategies", f"tensor.{kind}", "plan")
    found = getattr(module, "STRATEGY", None)
    found = found.get(kind) if isinstance(found, dict) else found  # one package may hold several kinds
    if isinstance(found, type) and issubclass(found, TensorStrategy):
        return found
    what = f"the tensor strategy {kind!r} is not usable: {module.__name__}.STRATEGY is not a subclass of TensorStrategy"
    raise ConfigError(Problem(what, "strategy.tensor.kind", f"remove the plug-in that adds tensor.{kind}"))


def strategies_of(plan: Plan) -> Strategies:
    """The torch-free halves of a plan's ways."""
    return Strategies(
        load_strategy("data", plan.data.kind),
        type(plan.tensor),
        load_strategy("pipeline", plan.pipeline.kind),
        load_strategy("expert", plan.expert.kind) if plan.expert.kind != routing.NO_DISPATCHER else None,
    )


def server_strategy_of(plan: Plan) -> ServerWayPlan:
    """The data strategy of a plan with servers."""
    assert plan.servers, f"{plan.data.kind} has no servers"
    return load_strategy("data", plan.data.kind)
