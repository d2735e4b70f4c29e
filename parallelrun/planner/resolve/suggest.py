"""Removal of suggestions that do not help: each `key=value` must fix its violation and cause no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from parallelrun.base.errors import Problem
from parallelrun.base.registry import has
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.model import definitions

MOST_TRIALS, MOST_SEARCHED = 12, 40  # keeps the time for a refusal well below a second
_PAIR = re.compile(r"([a-z_][a-z_.]*)=([\w.+-]+)")
_SEPARATOR = re.compile(r",? or ")
Solve = Callable[[Config, str], list[Problem]]


def keep_helpful(problems: list[Problem], config: Config, solve: Solve) -> list[Problem]:
    """Keep only the suggestions that help; if none does, suggest the nearest values that do.

    solve: returns the violations of a config in which the user has set a key. Suggestions that are not `key=value`
    (a preset's name, "leave it out") are kept without a trial, and so are those after MOST_TRIALS trials.
    """
    trials = 0
    out = []
    for problem in problems:
        helpful = []
        for alternative in _SEPARATOR.split(problem.suggestion):
            match = _PAIR.fullmatch(alternative)
            changed = with_value(config, match[1], parsed(match[2])) if match else None
            if match and changed is not None and trials < MOST_TRIALS:
                trials += 1
                if not _helps(problem, problems, solve(changed, match[1])):
                    continue
            helpful.append(alternative)
        if not helpful and len(problems) == 1:
            helpful = _nearest_cures(problem, config, solve)
        out.append(replace(problem, suggestion=" or ".join(helpful)) if helpful else problem)
    return out


def _helps(problem: Problem, before: list[Problem], after: list[Problem]) -> bool:
    """Return whether `problem` is fixed and no new problem occurs."""
    keys = {other.where for other in before}
    cured = all(left.what != problem.what for left in after)
    return cured and len(after) < len(before) and all(left.where in keys for left in after)


def _nearest_cures(problem: Problem, config: Config, solve: Solve) -> list[str]:
    """For each integer key in the problem: the nearest value that gives a legal plan."""
    values = []
    keys = dict.fromkeys(key for key, _ in _PAIR.findall(f"{problem.where}= {problem.what} {problem.suggestion}"))
    trials = 0
    for key in keys:
        value = attrgetter(key)(config) if with_value(config, key, None) else None
        if type(value) is not int:
            continue
        for candidate in _around(value):
            changed = with_value(config, key, candidate)
            trials += 1
            if changed is None or trials > MOST_SEARCHED:
                break
            if not solve(changed, key):
                values.append(f"{key}={candidate}")
                break
    return values


def _around(value: int) -> Iterator[int]:
    """The value - 1, + 1, - 2, + 2, ..., then its fractions and multiples."""
    for distance in range(1, 9):
        if value - distance >= 1:
            yield value - distance
        yield value + distance
    for factor in (2, 3, 4, 8, 16):
        if value // factor >= 1:
            yield value // factor
        yield value * factor


def with_value(config: Any, key: str, value: object) -> Any:
    """A copy of a configuration with `key` set, or None if the schema has no such key."""
    name, _, inner = key.partition(".")
    if not is_dataclass(config) or name not in {item.name for item in fields(config)}:
        return None
    if inner:
        value = with_value(getattr(config, name), inner, value)
    if is_dataclass(getattr(config, name)) != bool(inner) or (inner and value is None):
        return None
    return replace(config, **{name: value})  # type: ignore[type-var]


def with_adapters(config: Config) -> dict[str, object]:
    """The key by which only adapters are trained; none if the model takes none, or has them."""
    takes = has("models", config.model.name) and "lora" in (definitions.model(config).own_keys or ())
    return {"model.lora.rank": 8} if takes and config.model.lora.rank is None else {}


def parsed(text: str) -> object:
    """The int, float, bool, None or str that `key=text` sets."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(text, text)
