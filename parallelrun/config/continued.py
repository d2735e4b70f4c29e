"""The configuration of a run that goes on: that of the run it continues, with what the user has changed. Torch-free."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields, is_dataclass, replace
from typing import Any

from parallelrun.config.schema import Config

# Keys that each command line sets for itself.
_OWN = ("resume", "runs", "verb", "ranks", "plot", "path", "device", "profile", "verify", "bench", "sweep")
_DEGREES = ("dp", "tp", "pp", "ep")
_SHORTHANDS = (
    "layout",
    "grid",
    "depth",
    "schedule",
    "virtual_stages",
    "microbatches",
    "servers",
    "consistency",
    "staleness",
)
_OF_A_STRATEGY = (*_DEGREES, "world", "micro_batch", *_SHORTHANDS, "backup_workers")
_BATCH = ("global_batch", "local_batch", "micro_batch", "microbatches", "schedule")


def continued(new: Config, given: Set[str], saved: Config, world: int | None = None) -> Config:
    """`saved`, with every key of `given` as in `new`. world: how many ranks another launcher has started.

    A group that is chosen anew (`strategy=tp` where it was ddp) replaces the saved one, a strategy with its degrees.
    Where degrees are given, what followed from the old ones is filled in again; `world` asks for all degrees anew.
    """
    config = _overlaid(saved, new, given, "")
    config = _taken(config, new, _OWN)
    changed = [key for key in given if "." not in key and is_dataclass(getattr(new, key, None))]
    for group in changed:
        if _choice(new, group) != _choice(saved, group):
            config = _taken(config, new, (group,))
            config = _taken(config, new, _OF_A_STRATEGY) if group == "strategy" else config
    other_world = world is not None and world != saved.world
    if given & {*_DEGREES, "world"} or other_world:
        dropped = [key for key in _DEGREES if key not in given] if "world" in given or other_world else ["world"]
        config = _taken(config, new, (*dropped, "micro_batch"))
        tensor = replace(config.strategy.tensor, grid=new.strategy.tensor.grid, depth=new.strategy.tensor.depth)
        data = replace(config.strategy.data, shard=new.strategy.data.shard)
        config = replace(config, strategy=replace(config.strategy, tensor=tensor, data=data))
        config = _taken(config, new, ("world",)) if other_world else config
    if given & set(_BATCH):
        config = _taken(config, new, ("micro_batch",))
    if "local_batch" in given:
        config = _taken(config, new, ("global_batch",))
    return config


def differences(config: Config, saved: Config, given: Set[str]) -> list[str]:
    """The given keys whose values are not the saved run's, for people."""
    keys = [key for key in sorted(given) if key.partition(".")[0] not in _OWN]
    return [key for key in keys if _value(config, key) != _value(saved, key)]


def _overlaid(saved: Any, new: Any, given: Set[str], prefix: str) -> Any:
    """The dataclass `saved` with the given leaves of `new`; of a mapping, one given key takes it whole."""
    changes = {}
    for item in fields(saved):
        key, value = f"{prefix}{item.name}", getattr(new, item.name)
        if is_dataclass(value):
            changes[item.name] = _overlaid(getattr(saved, item.name), value, given, f"{key}.")
        elif key in given or any(one.startswith(f"{key}.") for one in given):
            changes[item.name] = value
    return replace(saved, **changes)


def _taken(config: Config, source: Config, keys: Any) -> Config:
    return replace(config, **{key: getattr(source, key) for key in keys})


def _choice(config: Config, group: str) -> str:
    section = getattr(config, group)
    return getattr(section, "preset", None) or section.name


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return config
