"""The recipes and the number of points of a sweep, parsed with Hydra's grammar before the first point runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil, prod
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, RangeSweep
from hydra.errors import HydraException

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS
from parallelrun.config.overrides import Override, unquoted

POINT_LIMIT = 10_000


def recipes_of(override: Override, names: Iterable[str]) -> list[str]:
    """The recipes that `recipe=...` can choose, as names or paths, in the sweep's order. Raises ConfigError.

    names: all known recipes, for `glob(...)`.
    """
    if not _is_call(override.value):
        return [unquoted(value) for value in override.values]
    if not override.multirun:
        cause = f"{override.text}: several values need a sweep (-m)"
        raise ConfigError(Problem(cause, "recipe", command=f"parallelrun -m ... {override.text}"))
    try:
        parsed = OverridesParser.create().parse_override(f"recipe={override.value}")
    except HydraException as error:
        raise ConfigError(Problem(f"{override.text}: {str(error).splitlines()[0]}", "recipe")) from error
    value: Any = parsed.value()
    if isinstance(value, Glob):
        recipes = value.filter(list(names))
    elif parsed.is_discrete_sweep():
        recipes = [unquoted(text) for text in islice(parsed.sweep_string_iterator(), POINT_LIMIT)]
    else:
        raise ConfigError(Problem(f"{override.text}: not a choice of recipes", "recipe", "recipe=choice(a,b)"))
    if not recipes:
        raise ConfigError(Problem(f"{override.text}: no recipe matches", "recipe", command="parallelrun ls recipes"))
    return recipes


def num_points(overrides: Sequence[Override]) -> int | None:
    """The number of points; None if another sweeper than Hydra's own treats the values as a search space.

    Raises ConfigError if there are more than POINT_LIMIT: Hydra lists all of them before the first runs.
    """
    if any(override.key == "hydra/sweeper" for override in overrides):
        return None
    counts = {override.text: _count(override) for override in overrides if override.multirun}
    total = prod(counts.values())
    if total > POINT_LIMIT:
        swept = " x ".join(f"{count:,}" for count in counts.values() if count > 1)
        cause = f"the sweep has {swept}{f' = {total:,}' if ' x ' in swept else ''} points; at most {POINT_LIMIT:,}"
        raise ConfigError(Problem(cause, "command line", command="parallelrun -m ... with fewer values"))
    return total


def is_swept(text: str) -> bool:
    """Whether an override in Hydra's grammar has several values."""
    try:
        return bool(OverridesParser.create().parse_override(text).is_sweep_override())
    except HydraException:
        return False  # Hydra reports the error


def _is_call(value: str) -> bool:
    """Whether a value is a function call of Hydra's grammar, `choice(a,b)`, not a path or a plain list."""
    name, opened, _ = value.partition("(")
    return bool(opened) and value.endswith(")") and name.isidentifier()


def _count(override: Override) -> int:
    """The number of values of an override; 1 if it is not a sweep, or not one that Hydra can parse."""
    if override.is_hydra:
        return 1
    if not _is_call(override.value):
        return len(override.values)
    try:
        parsed = OverridesParser.create().parse_override(f"{override.key}={override.value}")
    except HydraException:
        return 1
    value: Any = parsed.value()
    if isinstance(value, Glob):
        return len(value.filter(presets.options(override.key))) if override.key in GROUPS else 1
    if isinstance(value, RangeSweep):
        assert value.start is not None and value.stop is not None
        return max(0, ceil((value.stop - value.start) / value.step)) if value.step else 1
    return len(value.list) if parsed.is_choice_sweep() else 1
