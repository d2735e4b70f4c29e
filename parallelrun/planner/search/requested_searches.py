"""The searches that a command asks for: of the plan to run or show, and of the rank of a named plan.

`parallelrun.planner.search.open_keys` says whether one is asked for; a plan without it imports nothing of this module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import ConfigError
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.predict.step_time.rates import missing
from parallelrun.planner.predict.step_time.step import StepTime
from parallelrun.planner.resolve.shorthands import short_keys
from parallelrun.planner.search import open_keys
from parallelrun.planner.search.space import OPEN_KEYS, Space

if TYPE_CHECKING:
    from parallelrun.planner.search.result import Search

KEPT = 3
MOST_RANKED = 120_000  # candidates, legal or not, which take about three quarters of a second
MOST_RANKED_COUNTED = 60  # plans that are all priced in that time


def searched(
    config: Config, user_keys: frozenset[str], world: int, gpus: int | None = None, keep: int = KEPT
) -> Search:
    """Search on `world` ranks. Raises ConfigError where the cluster lacks rates, or no plan is legal and fits."""
    from parallelrun.planner.search import no_plan
    from parallelrun.planner.search.fastest_plans import search

    open_keys.check_rates(config, world)
    base, user_held = open_keys.base_of(config), user_keys - {"strategy"}
    result = search(base, user_held, world, keep, gpus=gpus, simplest=True)
    if not result.best:
        raise no_plan.error(base, user_held, result, gpus)
    return result


def has_rank(plan: Plan, config: Config) -> bool:
    """Whether a plan can be compared with all plans of as many ranks and samples."""
    return not plan.servers and not missing(config.cluster, config.precision.name)


def is_ranked_soon(plan: Plan, config: Config) -> bool:
    """Whether comparing a plan with all others takes less than a second."""
    return Space(opened(plan, config), frozenset(), plan.world).is_small(plan.spec, MOST_RANKED)


def among_all(plan: Plan, config: Config, time: StepTime, gpus: int | None = None, soon: bool = False) -> Search | None:
    """Search among all plans of as many ranks and samples, with the rank of this one; None if none of them fits.

    config: of the plan, which takes `time` for a step. soon: price fewer plans, so that a rank is more often a bound.
    """
    from parallelrun.planner.search.fastest_plans import MOST_COUNTED, search

    keep, most = (1, MOST_RANKED_COUNTED) if soon else (KEPT, MOST_COUNTED)
    try:
        result = search(
            opened(plan, config), frozenset(), plan.world, keep, against=time.step_s, gpus=gpus, most_counted=most
        )
    except ConfigError:
        return None
    return result if result.best else None


def opened(plan: Plan, config: Config) -> Config:
    """The configuration of a plan with everything that a search chooses left open."""
    free: dict[str, Any] = dict.fromkeys((*OPEN_KEYS, "local_batch", *short_keys()))
    pipeline = replace(config.strategy.pipeline, virtual_stages=None, split=[])
    strategy = replace(config.strategy, pipeline=pipeline)
    size = plan.batch.global_batch
    return replace(config, **free, strategy=strategy, world=plan.world, global_batch=size)
