"""The torch-free halves of the ways that a plan has chosen, from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parallelrun import registry
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan import routing
from parallelrun.plan.data_strategy import DataStrategy
from parallelrun.plan.strategy import ExpertWayPlan, PipelineWayPlan, TensorWayPlan
from parallelrun.plan.structure import Plan


@dataclass(frozen=True)
class Strategies:
    """The chosen ways' torch-free halves. expert: None where every rank has all experts (ep=1)."""

    data: type[DataStrategy]
    tensor: TensorWayPlan
    pipeline: PipelineWayPlan
    expert: ExpertWayPlan | None = None


def load_strategy(axis: str, kind: str) -> Any:
    """The `Way` of an axis (`tensor` | `pipeline` | `expert`) and kind. Raises KeyError for an unknown kind."""
    return registry.load("strategies", f"{axis}.{kind}", "plan").Way()


def data_strategy(kind: str) -> type[DataStrategy]:
    """The data strategy of that kind. Raises KeyError for an unknown kind."""
    found: type[DataStrategy] = _strategy_class("data", kind, DataStrategy)
    return found


def _strategy_class(axis: str, kind: str, base: type) -> Any:
    """The class that the package of a strategy names `STRATEGY` in its plan.py. Raises ConfigError without one."""
    module = registry.load("strategies", f"{axis}.{kind}", "plan")
    found = getattr(module, "STRATEGY", None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    what = f"{module.__name__} of the strategy {axis}.{kind} has no STRATEGY that is a subclass of {base.__name__}"
    fix = f"write STRATEGY = <the subclass of {base.__module__}.{base.__name__}> at the end of it"
    raise ConfigError(Problem(what, f"strategy.{axis}.kind", fix))


def strategies_of(plan: Plan) -> Strategies:
    """The torch-free halves of a plan's ways."""
    return Strategies(
        type(plan.data),
        load_strategy("tensor", plan.tensor.kind),
        load_strategy("pipeline", plan.pipeline.kind),
        load_strategy("expert", plan.expert.kind) if plan.expert.kind != routing.NO_DISPATCHER else None,
    )
