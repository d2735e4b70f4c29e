"""`recipe=runs/.../config.yaml`: the frozen configuration of a run, read as a recipe that repeats it."""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import yaml

from parallelrun.config import presets
from parallelrun.config.schema import Config

# What says where a run was and how it was started, not what it computed. `world` follows from the degrees, so that one
# of them can be overridden.
_NOT_REPEATED = ("world", "verb", "resume", "runs", "sweep", "plot", "detail")
# As if a user had chosen them: a model's own dataset and learning rate must not replace the run's.
GIVEN = frozenset({"dataset", "optimizer"})


def of(text: str, keys: Set[str]) -> str | None:
    """The recipe's text, where `text` (whose keys are `keys`) is a frozen configuration; None for any other recipe."""
    roots = {key.partition(".")[0] for key in keys}
    expected = {field.name for field in dataclasses.fields(Config)}
    if not expected <= roots:
        return None
    values = {key: value for key, value in yaml.safe_load(text).items() if key not in _NOT_REPEATED}
    preset = values["strategy"]["name"]
    if preset in presets.options("strategy"):  # mappings are merged with those of the preset that is chosen
        values = {"defaults": [{"override /strategy": preset}], **values}
    return yaml.safe_dump(values, sort_keys=False)
