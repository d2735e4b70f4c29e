"""The base class of expert dispatchers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.wording import divisors
from parallelrun.config.schema.run_schema import ExpertConfig
from parallelrun.planner.contract.axis_strategy import AxisStrategy
from parallelrun.planner.model.model_spec import BlockSpec

if TYPE_CHECKING:
    from typing_extensions import Self

    from parallelrun.planner.contract.collective import Collective
    from parallelrun.planner.contract.data_strategy import FlattenedDims, MeshDims
    from parallelrun.planner.contract.plan import Plan
    from parallelrun.planner.contract.request import Request


@dataclass(frozen=True)
class ExpertDispatcher(AxisStrategy):
    """How tokens reach experts on other ranks of the ep axis; `plan.expert` is one, or None if ep is 1.

    config_class: its keys of `strategy.expert`. needs_capacity: it refuses routers without a
    capacity per expert. chunks: parts of a microbatch's routing groups that are dispatched one after the other.
    group_size: ranks of an inner group of the two-level all-to-all, 1 for one level. overlap: all-to-alls overlap the
    shared expert and other chunks. spans_tp: ep is taken over dp x cp x tp: experts are complete, and the ranks of tp
    divide the tokens (Megatron's expert tensor parallel size 1).
    """

    config_class: ClassVar[type[ExpertConfig]] = ExpertConfig
    needs_capacity: ClassVar[bool] = False

    chunks: int = 1
    group_size: int = 1
    overlap: bool = True
    spans_tp: bool = False

    @classmethod
    def resolve(cls, request: Request) -> Self:
        section = request.config.strategy.expert
        return cls(section.chunks, section.group_size or 1, section.overlap, request.ep_data_ranks < request.ep)

    @classmethod
    def choices(cls, dp: int, experts: int) -> list[int]:
        """Return the degrees ep that a search compares. experts: number in a layer, 0 for a model without."""
        return divisors(gcd(dp, experts)) if experts else [1]

    @classmethod
    @abstractmethod
    def mesh_dims(cls, request: Request) -> tuple[MeshDims, FlattenedDims]:
        """Return (mesh dims that make up ep, major first; flattened dims): see MeshShape."""

    @abstractmethod
    def collectives(self, blocks: tuple[BlockSpec, ...], plan: Plan) -> list[Collective]:
        """Return one rank's all-to-alls of one training step (all microbatches) for those blocks."""

    def exchange_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return the bytes beside those that are saved while the second all-to-all of a block's forward pass runs."""
        return 0

    @abstractmethod
    def num_computed(self, plan: Plan) -> int:
        """Return the rows that experts of the busiest rank of ep compute of one microbatch, with empty slots."""

    @abstractmethod
    def saved_bytes(self, block: BlockSpec, plan: Plan) -> int:
        """Return the bytes that one microbatch of `block` keeps for backward because tokens are dispatched."""
