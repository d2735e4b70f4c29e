"""Two plans of one model, compared at other values of the cluster and the model: from where on one beats the other.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan, once
from parallelrun.planner.predict import cluster_cost, prediction
from parallelrun.planner.predict.step_time.step import step_time

NEVER = float("inf")


class Contender:
    """A plan at other values. planned: returns it with a configuration, or None where it is not legal."""

    def __init__(self, planned: Callable[[Config], Plan | None]):
        self._planned = planned
        self._known: dict[object, tuple[Plan | None, bool]] = {}

    def seconds(self, config: Config) -> float | None:
        """Return the seconds of a step: infinite if the plan does not fit a device, None if it is illegal or not
        predicted."""
        # Of what is varied, only the sizes of model and batch change the plan: the links of the cluster do not.
        key = config.model.seq, config.global_batch
        plan, is_fit = once(self._known, key, lambda: self._plan(config))
        time = step_time(plan, config.cluster) if plan else None
        if time is None:
            return None
        return time.step_s if is_fit else NEVER

    def _plan(self, config: Config) -> tuple[Plan | None, bool]:
        plan, cluster = self._planned(config), config.cluster
        if plan is None or not cluster.memory_gb:
            return plan, True
        return plan, cluster_cost.fits(prediction.heaviest(plan, cluster), cluster) == "yes"


@dataclass(frozen=True)
class Contest:
    """Whether the second plan beats the first."""

    first: Contender
    second: Contender

    def is_won(self, config: Config) -> bool | None:
        """None where one of the plans cannot be compared."""
        first, second = self.first.seconds(config), self.second.seconds(config)
        return None if first is None or second is None else second < first

    def edge(self, at: Callable[[int], Config], last: int) -> int:
        """The first of the steps 1 to `last` at which the second plan wins, if it wins from some step on.

        It is known to win at `last`. at: returns the configuration at a step. Bisection ends early where a step cannot
        be compared.
        """
        lost = 0
        while last - lost > 1:
            middle = (lost + last) // 2
            won = self.is_won(at(middle))
            if won is None:
                break
            lost, last = (lost, middle) if won else (middle, last)
        return last
