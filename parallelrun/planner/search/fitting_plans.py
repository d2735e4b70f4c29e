"""Which of the plans that fit a search keeps: the fastest, and what is shown beside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from parallelrun.planner.search.result import TIE, Found

NEVER = float("inf")
ROUNDING = 1e-9  # by which a lower bound can be above the time that it bounds
CLOSE, MOST_CLOSE = 0.01, 3  # variants of the fastest plan that are slower by at most this part; so many are kept
FAR = 2.0  # plans that take so many times as long as the fastest are not looked at for the sake of another shape


class Kept:
    """The `number` fastest plans, the fastest plan of each of the `number` fastest shapes, and variants of the fastest.

    A shape is whatever plans are told apart by, such as their degrees. `add` takes the plans by ascending time.
    complexity: of a shape. If given, the simplest plan that ties with the fastest is kept too, before all others.
    """

    def __init__(self, number: int, complexity: Callable[[Any], Any] | None = None):
        self._number, self._complexity = number, complexity
        self._plans: list[tuple[Hashable, float, Found]] = []
        self._shapes: dict[Hashable, list[float]] = {}  # seconds of the plans of each
        self._simplest: Any = None  # the least complexity of the plans that tie

    @property
    def all(self) -> list[Found]:
        """Every plan that was added, the fastest first; of equally fast ones that which needs least memory."""
        return [plan for _, _, plan in self._ordered()]

    def add(self, shape: Hashable, seconds: float, plan: Found) -> None:
        if self._complexity and self._is_simpler(shape, seconds):
            self._simplest = self._complexity(shape)
        self._plans.append((shape, seconds, plan))
        self._shapes.setdefault(shape, []).append(seconds)

    def _is_simpler(self, shape: Hashable, seconds: float) -> bool:
        """Whether a plan of that shape ties with the fastest, and is simpler than all that do so far."""
        if self._complexity is None or (self._plans and seconds > (1 + TIE) * self._plans[0][1]):
            return False
        return not self._plans or self._complexity(shape) < self._simplest

    def wants(self, shape: Hashable, least_s: float) -> bool:
        """Whether a plan of that shape which takes so long or longer can be kept."""
        if len(self._plans) < self._number or least_s <= (1 + ROUNDING) * self._plans[self._number - 1][1]:
            return True
        if self._is_simpler(shape, least_s):
            return True
        if self._number == 1:
            return False
        first, own = self._ordered()[0], self._shapes.get(shape)
        if own is None:
            most = FAR * first[1] if len(self._shapes) < self._number else (1 + ROUNDING) * self._last_shape
        elif shape == first[0]:
            most = (1 + CLOSE) * first[1] if len(own) <= MOST_CLOSE else (1 + ROUNDING) * own[MOST_CLOSE]
        else:
            most = (1 + ROUNDING) * own[0]
        return least_s <= most

    def ends(self, least_s: float) -> bool:
        """Whether no plan that takes so long or longer can be kept."""
        if len(self._plans) < self._number or (self._complexity and least_s <= (1 + TIE) * self._plans[0][1]):
            return False
        return least_s > self._end()

    def _end(self) -> float:
        first, last = self._plans[0][1], (1 + ROUNDING) * self._plans[self._number - 1][1]
        if self._number == 1:
            return last
        if len(self._shapes) < self._number:
            return max(last, FAR * first)
        return max(last, (1 + ROUNDING) * self._last_shape, (1 + CLOSE) * first)

    @property
    def _last_shape(self) -> float:
        """Seconds of the fastest plan of the slowest shape that is kept."""
        return sorted(own[0] for own in self._shapes.values())[self._number - 1]

    def chosen(self) -> list[Found]:
        """The plans that are kept, the fastest first, but before all the simplest that ties with it."""
        ordered = self._ordered()
        plans: list[Found] = []
        shapes: set[Hashable] = set()
        close = 0
        for index, (shape, seconds, plan) in enumerate(ordered):
            is_new = shape not in shapes and len(shapes) < self._number
            is_close = index > 0 and shape == ordered[0][0] and seconds <= (1 + CLOSE) * ordered[0][1]
            if index < self._number or (self._number > 1 and (is_new or (is_close and close < MOST_CLOSE))):
                plans.append(plan)
                close += is_close
            shapes.add(shape)
        if self._complexity and ordered:
            first = next(plan for shape, _, plan in ordered if self._complexity(shape) == self._simplest)
            plans = [first, *(plan for plan in plans if plan is not first)]
        return plans

    def _ordered(self) -> list[tuple[Hashable, float, Found]]:
        return sorted(self._plans, key=lambda entry: (entry[1], entry[2].heaviest_bytes))
