"""`recipe=runs/.../config.yaml`: the frozen configuration of a run, read as a recipe that repeats it."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import yaml

from parallelrun.config.schema import Config

# What says where a run was and how it was started, not what it computed. `world` follows from the degrees, so that one
# of them can be overridden.
_NOT_REPEATED = ("world", "verb", "resume", "runs", "sweep", "plot", "ranks")
# As if a user had chosen them: a model's own dataset and learning rate must not replace the run's.
GIVEN = frozenset({"dataset", "optimizer"})


def of(text: str, keys: Set[str]) -> str | None:
    """The recipe's text, where `text` (whose keys are `keys`) is a frozen configuration; None for any other recipe."""
    roots = {key.partition(".")[0] for key in keys}
    expected = {field.name for field in dataclasses.fields(Config)}
    if not expected <= roots:
        return None
    values = yaml.safe_load(text)
    return yaml.safe_dump({key: value for key, value in values.items() if key not in _NOT_REPEATED}, sort_keys=False)
