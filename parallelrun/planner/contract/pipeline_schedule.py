"""The base class of pipeline schedules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from parallelrun.config.schema.run_schema import PipelineConfig
from parallelrun.planner.contract.axis_strategy import AxisStrategy

if TYPE_CHECKING:
    from typing_extensions import Self

    from parallelrun.planner.contract.collective import Collective
    from parallelrun.planner.contract.plan import Plan
    from parallelrun.planner.contract.request import Request


class Action(NamedTuple):
    """One unit of a schedule. kind: F (forward), B (full backward), I (input gradient), W (weight gradient)."""

    kind: str
    stage: int
    microbatch: int


def is_pair(first: Action, second: Action) -> bool:
    """Whether two successive actions of a rank are one pair where the schedule `overlaps_passes`: a forward pass and
    the backward pass of another microbatch, of which one computes while the other waits for an all-to-all."""
    return first.kind == "F" and second.kind == "B" and first.stage != second.stage


@dataclass(frozen=True)
class PipelineSchedule(AxisStrategy):
    """The order in which the pp ranks compute the microbatches of their stages; `plan.pipeline` is one.

    config_class: its keys of `strategy.pipeline`. takes_microbatches: more than one microbatch is allowed.
    takes_virtual_stages: a rank may hold several stages. splits_backward: input and weight gradients are computed in
    separate passes, so hooks of parameters fire for half of them and custom backward functions run twice.
    overlaps_passes: pairs of actions (`is_pair`) take turns. repeats: after as many microbatches as there are stages,
    every rank goes on in equal rounds, and holds no more. virtual_stages: stages per rank.
    """

    config_class: ClassVar[type[PipelineConfig]] = PipelineConfig
    takes_microbatches: ClassVar[bool] = True
    takes_virtual_stages: ClassVar[bool] = False
    splits_backward: ClassVar[bool] = False
    overlaps_passes: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    virtual_stages: int = 1

    @classmethod
    def resolve(cls, request: Request) -> Self:
        return cls(request.virtual_stages)

    @classmethod
    def default_virtual_stages(cls, pp: int, num_layers: int) -> int:
        """Return the default number of stages per rank. num_layers: the most stages the model can have."""
        return 2 if cls.takes_virtual_stages else 1

    @classmethod
    def choices(cls, pp: int, num_layers: int) -> list[int]:
        """Return the numbers of stages per rank that a search compares. num_layers: the most stages the model can
        have. None for a schedule that is a special case of another."""
        return [1]

    @classmethod
    def least_in_flight(cls, pp: int, virtual_stages: int, microbatches: int, rank: int = 0) -> int:
        """Return how many forward passes of its stages a pp rank runs before its first backward, or fewer."""
        return 1

    @classmethod
    def pp_rank(cls, stage: int, pp: int) -> int:
        """Return the pp rank that runs a stage."""
        return stage % pp

    @abstractmethod
    def actions(self, plan: Plan) -> Sequence[Sequence[Action]]:
        """Return the actions of every pp rank in order: the input of the event simulation."""

    def order(self, plan: Plan, pp_rank: int) -> Sequence[Action]:
        """Return the actions of one pp rank in order."""
        return self.actions(plan)[pp_rank]

    @abstractmethod
    def live_bytes(self, plan: Plan, pp_rank: int, kept: Mapping[int, int]) -> list[tuple[Action, int]]:
        """Return a rank's actions in order, each with the bytes of activations and messages held when it begins.

        kept: per stage of that rank, the bytes that one microbatch keeps for backward.
        """

    @abstractmethod
    def collectives(self, pp_rank: int, plan: Plan) -> list[Collective]:
        """Return one rank's point-to-point messages of one step."""
