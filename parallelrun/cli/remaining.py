"""Further problems of a command line that cannot be planned, so that one error lists all of them. No Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from parallelrun.base.errors import ConfigError, ParallelrunError, Problem
from parallelrun.cli import errors
from parallelrun.config import overrides as override_checks
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, Key, known_keys
from parallelrun.config.overrides import Override, unquoted
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed
from parallelrun.config.values import BOOLEANS

_DEPENDENT = ("contradiction", "unread")  # kinds of violations that depend on the presets, too


def with_all(error: Exception, overrides: Sequence[Override], words: Sequence[str]) -> Exception:
    """`error` with the other problems of the overrides, if it is a ConfigError or Hydra's; else `error` itself."""
    translated: ParallelrunError | None = errors.translate(error)
    if translated is None or type(translated) is not ConfigError:
        return error
    return ConfigError(*translated.problems, *problems(overrides, words, translated.problems))


def problems(overrides: Sequence[Override], words: Sequence[str], reported: Sequence[Problem]) -> list[Problem]:
    """The problems that each override has by itself, without those of the keys already reported.

    words: flags and overrides, which name the folders of the user's own.
    """
    from parallelrun.planner.resolve.resolve_config import value_violations

    config = completed(Config())
    user_keys: set[str] = set()
    problems: list[Problem] = []
    for override in overrides:
        if override.is_hydra or override.is_own_group or len(override.values) != 1 or "${" in override.value:
            continue
        if override_checks.check(override, ""):
            continue
        if override.key in GROUPS:
            problems += _option(override.key, unquoted(override.value), words)
        elif (key := known_keys().get(override.key)) is not None:
            *path, last = key.name.split(".")
            with suppress(ValueError, TypeError):
                setattr(reduce(getattr, path, config), last, _value(key, override.value))
                user_keys |= {key.name, override.text.lstrip("+").partition("=")[0]}
    problems += [problem for problem in value_violations(config, frozenset(user_keys))
                 if problem.kind not in _DEPENDENT]  # fmt: skip
    selected = (user_keys | set(GROUPS)) - {problem.where for problem in reported}
    return [problem for problem in problems if problem.where in selected]


def _option(group: str, name: str, words: Sequence[str]) -> list[Problem]:
    """The problem with the name of an option that does not exist; files are left to Hydra."""
    options = [*presets.options(group), *presets.user_options(words, group)]
    return [presets.unknown(group, name, options)] if name.isidentifier() and name not in (*options, "null") else []


def _value(key: Key, text: str) -> Any:
    """The value that a text has. Raises ValueError if it is none for `key`; its type has been checked."""
    plain = unquoted(text).strip()
    if plain.lower() in ("null", "~"):
        return None
    if key.kind == "bool":
        return BOOLEANS[plain.lower()]
    if key.kind in ("int", "float", "str"):
        return {"int": int, "float": float, "str": str}[key.kind](plain)
    if key.kind != "list":
        raise ValueError(f"{key.name} is read by Hydra only")
    import yaml

    return yaml.safe_load(override_checks.name_list(text) if key.name in override_checks.NAME_LISTS else text)
