"""The base class of context-parallel strategies: ranks that share a sequence."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallelrun.config.schema.run_schema import Config, ContextConfig
from parallelrun.planner.contract.axis_strategy import AxisStrategy
from parallelrun.planner.contract.context_order import CONTIGUOUS, Spans
from parallelrun.planner.model.model_spec import BlockSpec
from parallelrun.planner.model.model_spec.attention import AttentionSpec

if TYPE_CHECKING:
    from parallelrun.planner.contract.collective import Collective
    from parallelrun.planner.contract.data_strategy import FlattenedDims, MeshDims
    from parallelrun.planner.contract.plan import Plan
    from parallelrun.planner.contract.request import Request


@dataclass(frozen=True)
class ContextStrategy(AxisStrategy):
    """How the cp ranks of a sequence attend to each other's tokens; `plan.context` is one, or None if cp is 1.

    config_class: its keys of `strategy.context`. in_turn: work is as slow as the slowest rank of every step of a ring,
    not of the whole. order: which positions a rank holds, a name of `ORDERS`.
    """

    config_class: ClassVar[type[ContextConfig]] = ContextConfig
    in_turn: ClassVar[bool] = False

    order: str = CONTIGUOUS

    @classmethod
    @abstractmethod
    def mesh_dims(cls, request: Request) -> tuple[MeshDims, FlattenedDims]:
        """Return (mesh dims that make up cp, major first; flattened dims): see MeshShape."""

    @abstractmethod
    def spans(self, index: int, plan: Plan) -> Spans:
        """Return the positions of the rank with that coordinate on cp, in the order in which it holds them."""

    def positions(self, index: int, plan: Plan) -> tuple[int, ...]:
        """Return the positions of `spans`, one by one."""
        return tuple(p for span in self.spans(index, plan) for p in range(span.start, span.stop, span.step))

    @abstractmethod
    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """Return one rank's messages over cp in one training step (all microbatches) for those blocks."""

    @abstractmethod
    def traffic(self, block: BlockSpec, plan: Plan) -> tuple[list[Collective], list[Collective]]:
        """Return (what one forward pass of one microbatch of a block sends, what its backward pass sends)."""

    @abstractmethod
    def exposed_s(self, communication: float, attention: float, plan: Plan) -> float:
        """Return the seconds of communication that the attention beside it, of so many seconds, does not hide."""

    @abstractmethod
    def passing_bytes(self, plan: Plan, attention: AttentionSpec) -> int:
        """Return what the backward pass of a block's attention holds beyond what it saves and gives: blocks of
        other ranks' keys and values, their gradients, and what arrives."""

    @abstractmethod
    def imbalance(self, plan: Plan, window: int | None) -> float:
        """Return the work of attention on the slowest rank over the mean. window: see `AttentionSpec`."""

    def orders(self, plan: Plan) -> list[str]:
        """Return the orders that this plan could have; empty where they make no difference."""
        return []

    @classmethod
    def choices(cls, heads: int) -> list[ContextConfig]:
        """Return the settings that a search compares, legal or not."""
        return []

    def resolved_config(self, config: Config) -> ContextConfig:
        """Return the section of `config` with the values that were filled in."""
        return config.strategy.context
