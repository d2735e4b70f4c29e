"""Which of the plans that fit a search keeps: the fastest, and what is shown beside them."""

from __future__ import annotations

from collections.abc import Hashable

from parallelrun.planner.search.result import Found

NEVER = float("inf")
ROUNDING = 1e-9  # by which a lower bound can be above the time that it bounds
CLOSE, MOST_CLOSE = 0.01, 3  # variants of the fastest plan that are slower by at most this part; so many are kept
FAR = 2.0  # plans that take so many times as long as the fastest are not looked at for the sake of another shape


class Kept:
    """The `number` fastest plans, the fastest plan of each of the `number` fastest shapes, and variants of the fastest.

    A shape is whatever plans are told apart by, such as their degrees. `add` takes the plans by ascending time.
    """

    def __init__(self, number: int):
        self._number = number
        self._plans: list[tuple[Hashable, float, Found]] = []
        self._shapes: dict[Hashable, list[float]] = {}  # seconds of the plans of each

    @property
    def all(self) -> list[Found]:
        """Every plan that was added, the fastest first; of equally fast ones that which needs least memory."""
        return [plan for _, _, plan in self._ordered()]

    def add(self, shape: Hashable, seconds: float, plan: Found) -> None:
        self._plans.append((shape, seconds, plan))
        self._shapes.setdefault(shape, []).append(seconds)

    def wants(self, shape: Hashable, least_s: float) -> bool:
        """Whether a plan of that shape which takes so long or longer can be kept."""
        if len(self._plans) < self._number or least_s <= (1 + ROUNDING) * self._plans[self._number - 1][1]:
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
        return len(self._plans) >= self._number and least_s > self._end()

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
        """The plans that are kept, the fastest first."""
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
        return plans

    def _ordered(self) -> list[tuple[Hashable, float, Found]]:
        return sorted(self._plans, key=lambda entry: (entry[1], entry[2].heaviest_bytes))
