"""Why a search has found no plan: the rule that removed most candidates, and the smallest changes that leave one.

Every change that is suggested has been searched with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.base.wording import counted, gib
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.resolve.suggest import with_adapters, with_value
from parallelrun.planner.search.fastest_plans import search
from parallelrun.planner.search.result import Search
from parallelrun.planner.search.space import OPEN_KEYS

MOST_DOUBLINGS = 5  # of the devices, or halvings of the batch, that are tried
HELD = ("recompute", *OPEN_KEYS)  # keys that hold for all plans if they are set, and may each be what leaves none


def error(config: Config, user_keys: frozenset[str], result: Search, gpus: int | None) -> ConfigError:
    """The error for a search without a result. config, user_keys, gpus: as it was searched with."""
    said = f"{counted(result.world, 'device')} of cluster={config.cluster.name}"

    def finds(changed: Config, keys: frozenset[str], world: int) -> bool:
        return bool(search(changed, keys, world, 1, gpus=gpus).best)

    if result.fitting and result.unpriced:
        first = result.unpriced[0]
        message = f"none of {counted(result.considered, 'plan')} on {said} can be compared: {first.reason}"
        return ConfigError(
            Problem(message, "cluster", command="parallelrun plan strategy=ptdp ... shows what is known")
        )
    changes = " or ".join(_changes(config, user_keys, result, finds))
    if result.considered:
        least = result.nearest
        needs = f"; the smallest needs {gib(least.heaviest_bytes)}: {' '.join(least.overrides)}" if least else ""
        has = f" of {gib(config.cluster.memory_gb * 1e9)}" if config.cluster.memory_gb else ""
        message = f"none of {counted(result.considered, 'legal plan')} on {said} fits a device{has}{needs}"
        return ConfigError(Problem(message, "gpus", changes, kind="arithmetic"))
    message = f"no plan on {said} is legal"
    if result.removed:
        most = result.removed[0]
        message += f"; the rule about {most.rule} removed most, {counted(most.candidates, 'candidate')}: {most.example}"
        changes = changes or most.suggestion
    return ConfigError(
        Problem(message, result.removed[0].rule if result.removed else "gpus", changes, kind="arithmetic")
    )


def _changes(
    config: Config, user_keys: frozenset[str], result: Search, finds: Callable[[Config, frozenset[str], int], bool]
) -> Iterator[str]:
    """Changes after which a search finds a plan: a key left out, adapters, a smaller batch, more devices."""
    for key in HELD:
        free = with_value(config, key, "none" if key == "recompute" else None)
        if key in user_keys and finds(free, user_keys - {key}, result.world):
            yield f"leave {key} out"
    for key, value in with_adapters(config).items():
        if finds(with_value(config, key, value), user_keys | {key}, result.world):
            yield f"{key}={value}"
    for size in _batches(result.global_batch, result.world):
        if finds(replace(config, global_batch=size, local_batch=None), user_keys | {"global_batch"}, result.world):
            yield f"global_batch={size}"
            break
    for doubling in range(1, MOST_DOUBLINGS + 1):
        world = result.world * 2**doubling
        if finds(replace(config, world=world), user_keys, world):
            yield f"gpus={world}"
            break


def _batches(global_batch: int, world: int) -> Iterator[int]:
    """The multiples of the devices around the batch, then its halves."""
    if global_batch % world:
        yield from sorted({max(1, global_batch // world) * world, -(-global_batch // world) * world})
    for halving in range(1, MOST_DOUBLINGS + 1):
        if global_batch % 2**halving == 0:
            yield global_batch // 2**halving
