"""The base class of all-reduce algorithms, and the counts of their messages. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.plan import Collective, Plan
from parallelrun.planner.contract.request import Request

from ..keys import AlgorithmKeys
from .rounds import SCATTER_REDUCE, Number, Rounds

if TYPE_CHECKING:
    from typing_extensions import Self

GROUP_SIZE = "strategy.data.group_size"
BUFFERS_ON_CPU = 2  # on gloo the receives of a round are posted while those of the round before are added


class Counts(NamedTuple):
    """Counts of one rank (or of each in an array) in one all-reduce: messages sent, elements in them, messages
    received."""

    sends: Number
    elements: Number
    receives: Number


@dataclass(frozen=True)
class Algorithm(ABC):
    """The base class. size: members of the group; index: one of them; numel: elements of the tensor that is summed.

    group_size: consecutive members that make an inner group (hierarchical).
    """

    native: ClassVar[bool] = False  # the backend chooses the messages
    has_groups: ClassVar[bool] = False
    text: ClassVar[tuple[str, str]] = ("", "")  # what it does, in sentences, and the paper: for `explain`

    name: str = field(default="", init=False)
    group_size: int = 1

    @classmethod
    def of(cls, request: Request) -> Self:
        """The algorithm with the settings of a request without violations."""
        return cls()

    @classmethod
    def check(cls, request: Request) -> list[Problem]:
        """Settings that it does not read, or that are illegal."""
        asked = AlgorithmKeys.of(request.config).group_size
        if asked is None:
            return []
        what = f"{GROUP_SIZE}={asked} is read by algorithm=hierarchical only"
        return [Problem(what, GROUP_SIZE, "strategy.data.algorithm=hierarchical", kind="unread")]

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Sentences on settings that were filled in."""
        return ()

    def over(self, axis: str, plan: Plan) -> Self:
        """The algorithm for a sum over `axis`: dp, or what ep leaves of it."""
        return self

    @abstractmethod
    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        """The rounds of a member; none where the backend chooses them."""

    @abstractmethod
    def counts(self, size: int, index: Number, numel: int, limit: int | None = None) -> Counts:
        """The messages of a member, in closed form, or of several at once: index may be an array of members.

        limit: elements of a piece of a message; None: messages are sent whole.
        """

    def longest_added(self, size: int, index: int, numel: int) -> int:
        """Elements of the longest message that a member adds to its own part."""
        adding = [one for one in self.rounds(size, index, numel) if one.phase == SCATTER_REDUCE]
        return max((one.receive.numel for one in adding if one.receive), default=0)

    def buffer_elements(self, size: int, index: int, numel: int, on_cpu: bool) -> int:
        """Elements of the buffers in which a member receives what it adds."""
        return self.longest_added(size, index, numel) * (BUFFERS_ON_CPU if on_cpu else 1)

    def collectives(
        self, size: int, index: int, numel: int, element_bytes: int, limit: int | None, axis: str = "dp"
    ) -> list[Collective]:
        """The predicted rows of one sum of gradients over `axis`. limit: see `counts`."""
        found = self.counts(size, index, numel, limit)
        return [
            Collective(axis, "send", "gradients", found.sends, found.elements * element_bytes),
            Collective(axis, "recv", "gradients", found.receives, 0),
        ]

    def links(self, size: int, numel: int) -> dict[tuple[int, int], int]:
        """Elements sent from one member to another: (from, to) -> how many, where there are any."""
        found: Counter[tuple[int, int]] = Counter()
        for index in range(size):
            for one in self.rounds(size, index, numel):
                if one.send:
                    found[index, one.send.peer] += one.send.numel
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class NativeAllReduce(Algorithm):
    """The backend's own all-reduce, whose messages nobody here knows."""

    native = True

    name: str = field(default="native", init=False)

    def rounds(self, size: int, index: int, numel: int) -> Rounds:
        return ()

    def counts(self, size: int, index: Number, numel: int, limit: int | None = None) -> Counts:
        return Counts(0, 0, 0)

    def collectives(
        self, size: int, index: int, numel: int, element_bytes: int, limit: int | None, axis: str = "dp"
    ) -> list[Collective]:
        return [Collective(axis, "all_reduce", "gradients", 1, numel * element_bytes)]


def num_pieces(numel: Number, limit: int | None) -> Number:
    """Messages for so many elements. limit: see `Algorithm.counts`."""
    return -(-numel // limit) if limit else 1 * (numel > 0)
