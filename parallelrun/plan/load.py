"""The classes of strategies by axis and kind, from the registry. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from parallelrun.config import strategy_keys
from parallelrun.errors import ConfigError, Problem
from parallelrun.plan.data_strategy import DataStrategy
from parallelrun.plan.expert_dispatcher import ExpertDispatcher
from parallelrun.plan.pipeline_schedule import PipelineSchedule
from parallelrun.plan.request import Request
from parallelrun.plan.tensor_strategy import TensorStrategy

Base = TypeVar("Base")


@dataclass(frozen=True)
class StrategyClasses:
    """The classes that a config chooses. expert: None where every rank has all experts (ep=1)."""

    data: type[DataStrategy]
    tensor: type[TensorStrategy]
    pipeline: type[PipelineSchedule]
    expert: type[ExpertDispatcher] | None = None


def data_strategy(kind: str) -> type[DataStrategy]:
    """Return the class of a data strategy. Raises KeyError for an unknown kind."""
    return strategy_class("data", kind, DataStrategy)


def tensor_strategy(kind: str) -> type[TensorStrategy]:
    """Return the class of a tensor strategy. Raises KeyError for an unknown kind."""
    return strategy_class("tensor", kind, TensorStrategy)


def pipeline_schedule(kind: str) -> type[PipelineSchedule]:
    """Return the class of a pipeline schedule. Raises KeyError for an unknown kind."""
    return strategy_class("pipeline", kind, PipelineSchedule)


def expert_dispatcher(kind: str) -> type[ExpertDispatcher]:
    """Return the class of an expert dispatcher. Raises KeyError for an unknown kind."""
    return strategy_class("expert", kind, ExpertDispatcher)


def strategy_class(axis: str, kind: str, base: type[Base]) -> type[Base]:
    """Return the class of a strategy. Raises KeyError for an unknown kind, ConfigError for a plug-in without one."""
    found = strategy_keys.strategy_class(axis, kind)
    if not issubclass(found, base):
        what = f"{found.__module__}.{found.__qualname__} is no subclass of {base.__name__}"
        raise ConfigError(Problem(what, f"strategy.{axis}.kind"))
    return found


def splits_backward(request: Request) -> bool:
    """Return whether the request's schedule computes input and weight gradients in separate passes."""
    return request.pp > 1 and pipeline_schedule(request.config.strategy.pipeline.kind).splits_backward
