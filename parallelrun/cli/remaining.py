"""Further problems of a command line that cannot be planned, so that one error lists all of them. No Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from parallelrun.base.errors import ConfigError, ParallelrunError, Problem
from parallelrun.cli import errors
from parallelrun.config import overrides as override_checks
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, Key, known_keys
from parallelrun.config.overrides import Override, unquoted
from parallelrun.config.schema.run_schema import Config
from parallelrun.config.schema.strategy_keys import completed

_DEPENDENT = ("contradiction", "unread")  # kinds of violations that depend on the presets, too


def with_all(error: Exception, overrides: Sequence[Override], words: Sequence[str]) -> Exception:
    """`error` with the other problems of the overrides, if it is a ConfigError or Hydra's; else `error` itself."""
    known: ParallelrunError | None = errors.translate(error)
    if known is None or type(known) is not ConfigError:
        return error
    return ConfigError(*known.problems, *problems(overrides, words, known.problems))


def problems(overrides: Sequence[Override], words: Sequence[str], told: Sequence[Problem]) -> list[Problem]:
    """The problems that each override has by itself, without those of the keys already told.

    words: flags and overrides, which name the folders of the user's own.
    """
    from parallelrun.planner.resolve.resolve_config import value_violations

    config = completed(Config())
    given: set[str] = set()
    problems: list[Problem] = []
    for override in overrides:
        if override.is_hydra or override.is_own_group or len(override.values) != 1 or "${" in override.value:
            continue
        if override_checks.check(override, ""):
            continue
        if override.key in GROUPS:
            problems += _option(override.key, unquoted(override.value), words)
        elif (key := known_keys().get(override.key)) is not None:
            with suppress(ValueError, TypeError):
                _set(config, key.name, _value(key, override.value))
                given |= {key.name, override.text.lstrip("+").partition("=")[0]}
    names = {problem.where for problem in told}
    problems += [one for one in value_violations(config, frozenset(given)) if one.kind not in _DEPENDENT]
    return [one for one in problems if one.where not in names and one.where in given | set(GROUPS)]


def _option(group: str, name: str, words: Sequence[str]) -> list[Problem]:
    """The problem with the name of an option that does not exist; files are left to Hydra."""
    known = [*presets.options(group), *presets.user_options(words, group)]
    return [presets.unknown(group, name, known)] if name.isidentifier() and name not in (*known, "null") else []


def _value(key: Key, text: str) -> Any:
    """The value that a text has. Raises ValueError if it is none for `key`; its type has been checked."""
    plain = unquoted(text).strip()
    if plain.lower() in ("null", "~"):
        return None
    if key.kind == "bool":
        return plain.lower() in ("true", "yes", "on")
    if key.kind in ("int", "float", "str"):
        return {"int": int, "float": float, "str": str}[key.kind](plain)
    text = override_checks.name_list(text) if key.name in override_checks.NAME_LISTS else text
    if key.kind != "list" or not text.startswith("["):
        raise ValueError(f"{key.name} is read by Hydra only")
    parts = [unquoted(part.strip()) for part in override_checks.split(text[1:-1])]
    return [_number(part) for part in parts]


def _number(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _set(config: Config, name: str, value: Any) -> None:
    node: Any = config
    *path, last = name.split(".")
    for part in path:
        node = getattr(node, part)
    setattr(node, last, value)
