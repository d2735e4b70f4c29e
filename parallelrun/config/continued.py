"""The configuration of a run that continues another: the saved one with the user's changes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields, is_dataclass, replace
from typing import Any

from parallelrun.config.keys import known_keys
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed

# Keys that are never taken over from the saved run.
_NOT_SAVED = (
    "resume", "runs", "verb", "detail", "plot", "path", "tokenizer", "device", "profile", "verify", "bench", "sweep",
)  # fmt: skip
_DEGREES = ("dp", "cp", "tp", "pp", "ep")
_OF_STRATEGY = (
    *_DEGREES, "world", "micro_batch", "layout", "grid", "depth", "schedule", "virtual_stages", "microbatches",
    "servers", "consistency", "staleness", "backup_workers",
)  # fmt: skip
_BATCH = ("global_batch", "local_batch", "micro_batch", "microbatches", "schedule")


def continued(new: Config, user_keys: Set[str], saved: Config, world: int | None = None) -> Config:
    """`saved`, with every key of `given` as in `new`. world: the number of ranks that another launcher has started.

    A group that is chosen again (`strategy=tp` instead of ddp) replaces the saved one; a new strategy also drops the
    saved degrees. If a degree is given, the values that depended on the old one are computed again; `world` drops all
    saved degrees.
    """
    new = completed(new)
    config = _overlaid(completed(saved), new, user_keys, "")
    config = _with_keys(config, new, _NOT_SAVED)
    changed = [key for key in user_keys if "." not in key and is_dataclass(getattr(new, key, None))]
    for group in changed:
        if _option(new, group) != _option(saved, group):
            config = _with_keys(config, new, (group,))
            config = _with_keys(config, new, _OF_STRATEGY) if group == "strategy" else config
    other_world = world is not None and world != saved.world
    if user_keys & {*_DEGREES, "world"} or other_world:
        is_new_world = "world" in user_keys or other_world
        dropped = [key for key in _DEGREES if key not in user_keys] if is_new_world else ["world"]
        config = _with_keys(config, new, (*dropped, "micro_batch"))
        config = _with_degree_settings(config, new)
        config = _with_keys(config, new, ("world",)) if other_world else config
    if user_keys & set(_BATCH):
        config = _with_keys(config, new, ("micro_batch",))
    if "local_batch" in user_keys:
        config = _with_keys(config, new, ("global_batch",))
    return config


def differences(config: Config, saved: Config, user_keys: Set[str]) -> list[str]:
    """The given keys whose values differ from the saved run's, sorted."""
    keys = [key for key in sorted(user_keys) if key.partition(".")[0] not in _NOT_SAVED]
    return [key for key in keys if _value(config, key) != _value(saved, key)]


def _overlaid(saved: Any, new: Any, user_keys: Set[str], prefix: str) -> Any:
    """The dataclass `saved` with the given keys of `new`; one given key of a mapping replaces the mapping."""
    changes = {}
    for item in fields(saved):
        key, value = f"{prefix}{item.name}", getattr(new, item.name)
        if is_dataclass(value):
            changes[item.name] = _overlaid(getattr(saved, item.name), value, user_keys, f"{key}.")
        elif key in user_keys or any(user_key.startswith(f"{key}.") for user_key in user_keys):
            changes[item.name] = value
    return replace(saved, **changes)


def _with_keys(config: Config, source: Config, keys: Any) -> Config:
    return replace(config, **{key: getattr(source, key) for key in keys})


def _with_degree_settings(config: Config, new: Config) -> Config:
    """`config` with the values of `new` for the strategies' keys that suit certain degrees only."""
    strategy = config.strategy
    for name, key in known_keys().items():
        if key.of_degrees:
            axis, own = name.split(".")[1:]
            section = replace(getattr(strategy, axis), **{own: getattr(getattr(new.strategy, axis), own)})
            strategy = replace(strategy, **{axis: section})
    return replace(config, strategy=strategy)


def _option(config: Config, group: str) -> str:
    section = getattr(config, group)
    return str(getattr(section, "preset", None) or section.name)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return config
