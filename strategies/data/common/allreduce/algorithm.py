"""The base class of all-reduce algorithms, and the counts of their messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.collective import Collective
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.contract.request import Request

from ..keys import AlgorithmKeys
from .rounds import SCATTER_REDUCE, Number, Rounds

GROUP_SIZE = "strategy.data.group_size"


class Counts(NamedTuple):
    """Messages sent in one all-reduce by a rank (or each in an array), elements in them, messages received."""

    sends: Number
    elements: Number
    receives: Number


@dataclass(frozen=True)
class Algorithm(ABC):
    """The base class. size: the number of members of the group; index: of one member; numel: elements of the tensor.

    group_size: consecutive members that make an inner group (hierarchical).
    """

    native: ClassVar[bool] = False  # the backend chooses the messages
    has_groups: ClassVar[bool] = False
    text: ClassVar[tuple[str, str]] = ("", "")  # what it does, in sentences, and the paper: for `explain`

    name: str = field(default="", init=False)
    group_size: int = 1

    @classmethod
    def of(cls, request: Request) -> Algorithm:
        """The algorithm with the settings of a request without violations."""
        return cls()

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        group_size = AlgorithmKeys.of(request.config).group_size
        if group_size is None:
            return []
        message = f"{GROUP_SIZE}={group_size} is read by algorithm=hierarchical only"
        return [Problem(message, GROUP_SIZE, "strategy.data.algorithm=hierarchical", kind="unread")]

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Sentences on settings that were filled in."""
        return ()

    def over(self, axis: str, plan: Plan) -> Algorithm:
        """The algorithm for a sum over `axis`: dp, or what ep leaves of it."""
        return self

    @abstractmethod
    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        """The rounds of a member; none where the backend chooses them."""

    @abstractmethod
    def counts(self, size: int, index: Number, numel: int) -> Counts:
        """Count the messages of a member in closed form, or of several: index may be an array."""

    def longest_added(self, size: int, index: int, numel: int) -> int:
        """Elements of the longest message that a member adds to its own part."""
        adding = [turn for turn in self.rounds(size, index, numel) if turn.phase == SCATTER_REDUCE]
        return max((turn.receive.numel for turn in adding if turn.receive), default=0)

    def collectives(self, size: int, index: int, numel: int, element_bytes: int, axis: str = "dp") -> list[Collective]:
        """The predicted rows of one sum of gradients over `axis`."""
        counts = self.counts(size, index, numel)
        return [
            Collective(axis, "send", "gradients", counts.sends, counts.elements * element_bytes),
            Collective(axis, "recv", "gradients", counts.receives, 0),
        ]


@dataclass(frozen=True)
class NativeAllReduce(Algorithm):
    """The backend's own all-reduce, whose messages are not known here."""

    native = True

    name: str = field(default="native", init=False)

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        return ()

    def counts(self, size: int, index: Number, numel: int) -> Counts:
        return Counts(0, 0, 0)

    def collectives(self, size: int, index: int, numel: int, element_bytes: int, axis: str = "dp") -> list[Collective]:
        return [Collective(axis, "all_reduce", "gradients", 1, numel * element_bytes)]
