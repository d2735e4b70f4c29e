"""The classes of strategies by axis and kind, from the registry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema import strategy_keys
from parallelrun.planner.contract.context_strategy import ContextStrategy
from parallelrun.planner.contract.data_strategy import DataStrategy
from parallelrun.planner.contract.expert_dispatcher import ExpertDispatcher
from parallelrun.planner.contract.pipeline_schedule import PipelineSchedule
from parallelrun.planner.contract.request import Request
from parallelrun.planner.contract.tensor_strategy import TensorStrategy

Base = TypeVar("Base")


@dataclass(frozen=True)
class StrategyClasses:
    """The classes that a config chooses. expert: None where every rank has all experts (ep=1); context: None where
    every rank has complete sequences (cp=1)."""

    data: type[DataStrategy]
    tensor: type[TensorStrategy]
    pipeline: type[PipelineSchedule]
    expert: type[ExpertDispatcher] | None = None
    context: type[ContextStrategy] | None = None


def strategy_class(base: type[Base], axis: str, kind: str) -> type[Base]:
    """Return the class of a strategy. Raises KeyError for an unknown kind, ConfigError for a plug-in without one."""
    strategy = strategy_keys.strategy_class(axis, kind)
    if not issubclass(strategy, base):
        message = f"{strategy.__module__}.{strategy.__qualname__} is no subclass of {base.__name__}"
        raise ConfigError(Problem(message, f"strategy.{axis}.kind"))
    return strategy


# By kind, as `strategy_class`.
data_strategy = partial(strategy_class, DataStrategy, "data")
tensor_strategy = partial(strategy_class, TensorStrategy, "tensor")
pipeline_schedule = partial(strategy_class, PipelineSchedule, "pipeline")
expert_dispatcher = partial(strategy_class, ExpertDispatcher, "expert")
context_strategy = partial(strategy_class, ContextStrategy, "context")


def splits_backward(request: Request) -> bool:
    """Return whether the request's schedule computes input and weight gradients in separate passes."""
    return request.pp > 1 and pipeline_schedule(request.config.strategy.pipeline.kind).splits_backward
