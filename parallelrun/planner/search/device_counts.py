"""How many devices to rent: the fastest plan on clusters of several sizes, its days and its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import one_of
from parallelrun.config.schema.run_schema import OBJECTIVES, Config
from parallelrun.planner.predict.cluster_cost import DAY
from parallelrun.planner.search import open_keys
from parallelrun.planner.search.fastest_plans import MOST_COUNTED, search
from parallelrun.planner.search.result import Search

TIME, COST, FEWEST = OBJECTIVES
HOUR = 3600.0
MOST_DEVICES = 2**14  # unless `gpus` allows more
ENOUGH = 1.1  # a cluster twice as large that is less than so much faster ends the doubling


@dataclass(frozen=True)
class TrainingCost:
    """Duration and price of a training. price: None where the cluster gives none."""

    days: float
    device_hours: float
    price: float | None


@dataclass(frozen=True)
class Size:
    """A number of devices, what a search finds on them, and what the training takes with its best plan."""

    devices: int
    found: Search
    training: TrainingCost


def training_of(config: Config, result: Search) -> TrainingCost | None:
    """Return duration and price of training on `tokens` with the best plan of a search; None without `tokens`."""
    if config.tokens is None or not result.best:
        return None
    best = result.best[0]
    assert best.time is not None and best.tokens_per_s is not None
    tokens_per_step = best.tokens_per_s * best.time.step_s
    days = ceil(config.tokens / tokens_per_step) * best.time.step_s / DAY
    hours = days * DAY / HOUR * result.world
    price = config.cluster.price_per_gpu_hour
    return TrainingCost(days, hours, price * hours if price is not None else None)


def compares_sizes(config: Config) -> bool:
    """Return whether the objective asks for a number of devices. Raises ConfigError for what it lacks."""
    objective = config.objective or TIME
    if problems := one_of("objective", objective, OBJECTIVES):
        raise ConfigError(*problems)
    if config.days is not None and config.tokens is None:
        raise ConfigError(Problem(f"days={config.days:g} bounds a training of unknown length", "days", "tokens=300e9"))
    if objective == TIME and config.days is None:
        return False
    if config.tokens is None:
        message = f"objective={objective} compares whole trainings, and tokens is not given"
        raise ConfigError(Problem(message, "tokens", "tokens=300e9"))
    if objective == FEWEST and config.days is None:
        message = f"objective={objective} looks for the fewest devices that are fast enough, and days is not given"
        raise ConfigError(Problem(message, "days", "days=30"))
    return objective != TIME


def compared(config: Config, user_keys: frozenset[str], keep: int) -> tuple[list[Size], Size]:
    """(the sizes that were searched, by number of devices; the one that the objective and `days` choose).

    `gpus` or `world` is the most devices. Sizes double from the smallest with a plan that fits until one is fast enough
    (objective=gpus) or a larger one is hardly faster; then sizes next to the best one are tried. Raises ConfigError if
    none is fast enough.
    """
    base, held = open_keys.base_of(config), user_keys - {"strategy", "world", "gpus"}
    most = config.world or MOST_DEVICES
    open_keys.check_rates(config, most)
    tried: dict[int, Size | None] = {}

    def size(devices: int) -> Size | None:
        if devices not in tried:
            tried[devices] = searched(devices, 1, 0)  # one that is not chosen shows its fastest plan alone
        return tried[devices]

    def searched(devices: int, keep: int, most_counted: int) -> Size | None:
        sized = replace(base, world=devices)
        result = search(sized, held, devices, keep, most_counted=most_counted, simplest=keep > 1)
        training = training_of(config, result)
        return Size(devices, result, training) if training else None

    _double(size, most, config.days if config.objective == FEWEST else None)
    best = _best(tried.values(), config)
    for devices in _between(best.devices, config.cluster.gpus_per_node or 1) if best else ():
        if devices <= most:
            size(devices)
    sizes = [tried_size for _, tried_size in sorted(tried.items()) if tried_size]
    best = _best(sizes, config) or _too_slow(config, sizes, most)
    selected = searched(best.devices, keep, MOST_COUNTED)
    assert selected is not None, "searched a moment ago"
    return [selected if tried_size is best else tried_size for tried_size in sizes], selected


def _double(size: Callable[[int], Size | None], most: int, days: float | None) -> None:
    """Search on 1, 2, 4, ... devices. days: end where the training takes no more; None: where it hardly gets faster."""
    devices, before = 1, None
    while devices <= most:
        here = size(devices)
        if here and (before or days is not None):
            is_enough = before and before.training.days < ENOUGH * here.training.days
            if is_enough if days is None else here.training.days <= days:
                break
        devices, before = 2 * devices, here or before


def _between(devices: int, per_host: int) -> Iterator[int]:
    """Sizes between a power of two and its neighbours, of whole hosts where they are larger than one."""
    for of_four in (5, 6, 7):
        for whole in (devices // 2, devices):
            count, rest = divmod(whole * of_four, 4)
            if count and not rest and (count < per_host or count % per_host == 0):
                yield count


def _best(sizes: Iterable[Size | None], config: Config) -> Size | None:
    enough = [size for size in sizes if size and size.training.days <= (config.days or float("inf"))]
    if config.objective == COST:
        return min(enough, key=lambda size: size.training.device_hours, default=None)
    return min(enough, key=lambda size: size.devices, default=None)


def _too_slow(config: Config, sizes: Sequence[Size], most: int) -> Size:
    """Raise ConfigError: no size is fast enough."""
    if not sizes:
        message = f"no plan fits on any number of devices up to {most:,}"
        raise ConfigError(Problem(message, "gpus", "a larger gpus or a larger global_batch"))
    fastest = min(sizes, key=lambda size: size.training.days)
    days = f"{fastest.training.days:.1f} days on {fastest.devices:,} devices"
    message = (
        f"{config.tokens:g} tokens take {days}, the fastest of {len(sizes)} sizes up to {most:,}; days={config.days:g}"
    )
    assert config.days is not None, "every size is fast enough"
    least = ceil(fastest.devices * fastest.training.days / config.days)  # were a step shorter by as many devices
    fix = f"days={ceil(fastest.training.days)}, or a larger gpus: at least {least:,}"
    raise ConfigError(Problem(message, "days", fix))
