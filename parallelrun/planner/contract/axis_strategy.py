"""The base class of the strategies of all axes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from parallelrun.base.errors import Problem
from parallelrun.planner.contract.plan import Equivalence, Plan

if TYPE_CHECKING:
    from typing_extensions import Self

    from parallelrun.planner.contract.messages import Explanation
    from parallelrun.planner.contract.request import Request


class AxisStrategy(ABC):
    """A strategy of one axis with its resolved settings: a field of a Plan.

    Class methods answer questions about a request, before there is a plan. Methods are pure functions of their
    arguments and take the plan that the strategy is part of.

    kind: the name in the registry, without the axis.
    """

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def check(cls, request: Request) -> list[Problem]:
        """Return every violation, each with the nearest legal values."""

    @classmethod
    def is_legal(cls, request: Request) -> bool:
        """Return whether `check` finds nothing. A search asks thousands of times, and needs no suggestions."""
        return not cls.check(request)

    @classmethod
    @abstractmethod
    def resolve(cls, request: Request) -> Self:
        """Return the strategy of a request without violations, with every setting chosen."""

    @classmethod
    def filled(cls, request: Request) -> tuple[str, ...]:
        """Return sentences on the settings that were filled in, such as `depth=2 (filled: the largest legal)`."""
        return ()

    def equivalence(self, plan: Plan) -> Equivalence:
        """Return what training promises in comparison with one device."""
        return Equivalence("exact")

    @abstractmethod
    def explain(self, plan: Plan) -> Explanation:
        """Return every message or collective of a step in the group of rank 0, for `parallelrun explain`."""
