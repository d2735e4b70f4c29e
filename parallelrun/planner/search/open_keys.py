"""`strategy=auto`, and `plan` without a strategy: whether a search chooses the plan, and what it chose.

A search compares plans by the predicted time of a step, so the cluster must give the rates of its devices and links.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import presets
from parallelrun.config.schema.cluster_schema import ClusterConfig
from parallelrun.config.schema.run_schema import Config, StrategyConfig
from parallelrun.config.schema.strategy_keys import completed
from parallelrun.planner.predict.step_time.rates import absent, missing
from parallelrun.planner.resolve import rules
from parallelrun.planner.resolve.default_precision import with_precision
from parallelrun.planner.resolve.suggest import parsed, with_value

if TYPE_CHECKING:
    from parallelrun.planner.search.result import Found

PLAN = "plan"  # the verb
CHOSEN = ("strategy", "dp", "cp", "tp", "pp", "ep")  # a `plan` that gives one of them plans that, and searches nothing
SIZES = ("gpus", "objective", "days")  # these are asked of a search


def is_open(config: Config, user_keys: frozenset[str]) -> bool:
    """Return whether a search is to choose the plan.

    `strategy=auto` asks for it. `plan` without a strategy and without a degree searches if it is told what to search
    on: a number of devices, or a cluster that gives the rates of its devices. `plan model=gpt` alone shows the default
    strategy. Raises ConfigError for keys that only a search reads where a strategy or a degree is given.
    """
    if config.strategy.searches:
        return True
    if config.verb != PLAN:
        return False
    if chosen := [key for key in CHOSEN if key in user_keys]:
        _refuse_unread(user_keys, chosen[0])
        return False
    if user_keys & {*SIZES}:
        return True
    precision = with_precision(config, None)[0].precision
    return "cluster" in user_keys and not missing(config.cluster, precision.name)


def _refuse_unread(user_keys: frozenset[str], chosen: str) -> None:
    """Raise ConfigError for keys of a search where `chosen` says what to plan."""
    for key in SIZES[1:]:
        if key in user_keys:
            message = f"{key} is read by a search, and {chosen} says what to plan"
            raise ConfigError(Problem(message, key, f"leave {chosen} out or leave {key} out", kind="unread"))


def num_devices(config: Config, world: int | None, gpus: int | None) -> int:
    """The number of ranks to search on. world: that a launcher has started; gpus: of this host.

    Unless given: the GPUs of this host for a run, the devices of the cluster (of one host if it does not say how many
    it has) for a plan. Raises ConfigError if none of these is known.
    """
    if config.world is not None and world not in (None, config.world):
        message = f"world={config.world}, but the launcher has started {world} ranks"
        raise ConfigError(Problem(message, "world", f"world={world}", kind="contradiction"))
    cluster = config.cluster
    here = (cluster.gpus_per_node or 0) * (cluster.nodes or 1) if config.verb == PLAN else gpus
    count = world or config.world or here
    if not count:
        message = "the number of devices to search on is not known"
        raise ConfigError(Problem(message, "gpus", "gpus=8 or world=8"))
    return count


def calibrated(config: Config, user_keys: frozenset[str], gpus: int | None) -> tuple[Config, list[str]]:
    """(`config` with the rates of this machine, if they have been measured and no cluster was chosen, and with the
    default precision; the sentence on that). gpus: of this host."""
    names_cluster = any(key.partition(".")[0] == "cluster" for key in user_keys)
    has_rates = not missing(config.cluster, with_precision(config, gpus)[0].precision.name)
    if not names_cluster and not has_rates and presets.own_file("cluster", presets.MINE):
        config = replace(config, cluster=replace(ClusterConfig(), **presets.values("cluster", presets.MINE)))
    return with_precision(config, gpus)


def base_of(config: Config) -> Config:
    """The configuration that a search starts from: the default strategy in the place of the one that searches."""
    if not config.strategy.searches:
        return config
    name = StrategyConfig().name
    same: dict[str, Any] = {key: presets.values("strategy", name)[key] for key in ("fill_order", "demo")}
    same["description"] = f"chosen by strategy={config.strategy.name}"
    return replace(config, strategy=replace(config.strategy, name=name, searches=False, **same))


def check_rates(config: Config, world: int) -> None:
    """Raise ConfigError for `cluster` keys that no machine has, or those without which plans cannot be compared."""
    if problems := rules.out_of_bounds(config, "cluster."):
        raise ConfigError(*problems)
    lacking = absent(config.cluster, with_precision(config, None)[0].precision.name, world)
    if lacking:
        keys = ", ".join(f"cluster.{key}" for key in lacking)
        message = f"a search compares predicted times, and cluster={config.cluster.name} does not give {keys}"
        fix = f"cluster=h100_dgx, or cluster={presets.MINE} after a calibration of this machine"
        raise ConfigError(Problem(message, "cluster", fix, "parallelrun calibrate"))


def with_choice(config: Config, user_keys: frozenset[str], plan: Found) -> tuple[Config, frozenset[str]]:
    """The configuration of a plan that was found, with plain degrees and a plain strategy, and the keys that it sets.

    config, user_keys: those that were searched with.
    """
    changed = completed(base_of(config))
    for text in plan.overrides:
        key, _, value = text.partition("=")
        changed = with_value(changed, key, parsed(value))
        assert changed is not None, f"the search has set an unknown key: {text}"
    if any(text.startswith("global_batch=") for text in plan.overrides):
        changed = replace(changed, local_batch=None)
    return changed, user_keys | {text.partition("=")[0] for text in plan.overrides}
