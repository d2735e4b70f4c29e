"""Short names of keys that are no strategy's: `path` and `tokenizer` for dataset.*, `gpus` for world.

A rank has one device, so the number of devices is the number of ranks, under the name of what is rented.
"""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config.schema.run_schema import Config


def fold(config: Config, keys: Set[str]) -> tuple[Config, set[str]]:
    """Move `path` and `tokenizer` to dataset.*, and `gpus` to world, in the configuration and in the keys given.

    `gpus` stays in those, because a strategy with servers refuses it. Raises ConfigError if both names of a key are
    given with different values.
    """
    user_keys = set(keys)
    for short in ("path", "tokenizer"):
        value: str | None = getattr(config, short)
        if value is not None:
            _refuse_two(short, value, f"dataset.{short}", getattr(config.dataset, short))
            own: dict[str, Any] = {short: os.path.expanduser(value)}
            changes: dict[str, Any] = {short: None, "dataset": replace(config.dataset, **own)}
            config = replace(config, **changes)
            user_keys = (user_keys - {short}) | {f"dataset.{short}"}
    if config.gpus is not None:
        if config.gpus < 1:
            raise ConfigError(Problem(f"gpus={config.gpus} is not a whole number of at least 1", "gpus", "gpus=1"))
        _refuse_two("gpus", config.gpus, "world", config.world)
        config, user_keys = replace(config, gpus=None, world=config.gpus), user_keys | {"world"}
    return config, user_keys


def _refuse_two(short: str, value: object, key: str, other: object) -> None:
    if other not in (None, value):
        cause = f"{short}={value} contradicts {key}={other}"
        raise ConfigError(Problem(cause, short, "one of the two", kind="contradiction"))
