"""The result of a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallelrun.planner.predict.step_time.step import StepTime

TIE = 0.02  # plans that are slower than the fastest by at most this part tie with it: no prediction tells them apart
MEMORY = "memory"  # the rule that candidates do not fit a device


@dataclass(frozen=True)
class Found:
    """One plan. overrides: what turns the user's command line into this plan. fits: yes | no | unknown.

    time: None where torch-free code cannot price the plan; `reason` then says why. heaviest_bytes: of the rank that
    holds most. tokens_per_s: of all ranks together.
    """

    overrides: tuple[str, ...]
    time: StepTime | None
    heaviest_bytes: int
    fits: str
    tokens_per_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Removed:
    """A rule that removed candidates, their number, and what it said of one of them, with the change that it
    suggests (empty where it suggests none). rule: MEMORY, or what is checked: the tensor layout, the schedule..."""

    rule: str
    candidates: int
    example: str
    suggestion: str = ""


@dataclass(frozen=True)
class Search:
    """All plans of a model on `world` ranks of a cluster.

    considered: legal plans. fitting: those that fit a device's memory, or all if the cluster gives no memory size.
    best: the fastest that fit, and some of other shapes (`fitting_plans.Kept`), the fastest first, but before all a
    simpler one that ties with it, if that was asked for. nearest: of the plans that are faster than the best and do not
    fit, the one that needs least memory. unpriced: the first plan without a time, for each reason, and `num_unpriced`
    by reason. removed: most candidates first. rank: of a plan that takes `against` seconds: 1 + the number of faster
    plans that fit, at least and at most. global_batch: of all plans. is_counted: False in a large space, where
    plans whose lower bounds are too slow are not looked at: then `fitting` counts those, too (at most so many fit), the
    worst rank comes from bounds, and `nearest` is one of the plans that were looked at. priced: plans that fit and were
    priced in full.
    """

    world: int
    global_batch: int
    considered: int
    fitting: int
    best: tuple[Found, ...]
    nearest: Found | None = None
    unpriced: tuple[Found, ...] = ()
    num_unpriced: dict[str, int] = field(default_factory=dict)
    removed: tuple[Removed, ...] = ()
    rank: tuple[int, int] | None = None
    is_counted: bool = True
    priced: int = 0

    @property
    def fastest(self) -> Found:
        """The fastest plan, which `best` begins with unless a simpler one ties with it."""
        return min(self.best, key=lambda plan: plan.time.step_s if plan.time else float("inf"))
