"""Limits on untrusted recipes, checked on the composed configuration.

`recipe_check` reads a recipe's text. A text can hide its effect behind an interpolation, a model of another folder or
a symbolic link. So the composed values are checked too, and the size to which a recipe's interpolations expand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from parallelrun.base.errors import Problem
from parallelrun.config.keys import CODE_KEYS
from parallelrun.config.schema.run_schema import Config

TRUST = "parallelrun --trust ..., if you trust its author"
WRITTEN_KEYS = ("runs", "plot", "dataset.cache", "sweep.directory", "sweep.resume")
EXPANSION_LIMIT = 10_000  # characters that all ${key} of a recipe expand to
CHAIN_LIMIT = 20  # length of ${key} -> ${key} -> ...
_KEY = re.compile(r"\$\{([^${}]*)\}")
_EACH = 10  # characters that one ${key} counts as, for the time to resolve it
_ELSEWHERE = 100  # characters that a key of another file counts as


def check(config: Config, set_by_recipe: Set[str], typed: Set[str], where: str) -> list[Problem]:
    """Violations in the configuration that an untrusted recipe composes to.

    set_by_recipe: the keys and groups that the recipe sets; typed: those that the user typed, which are allowed.
    """
    problems = []
    fields = asdict(config)
    for key in CODE_KEYS:
        if _get(fields, key) is not None and not typed & {key, key.partition(".")[0]}:
            problems.append(Problem(f"{key}: a recipe may not name code", where, command=TRUST))
    for key in WRITTEN_KEYS:
        value = _get(fields, key)
        if key in set_by_recipe - typed and value is not None and not stays_in_working_folder(str(value)):
            cause = f"{key}={value}: a recipe may not write outside the working folder"
            problems.append(Problem(cause, where, command=TRUST))
    for name in _names_of_code(fields, ""):
        if not any(name == key or name.startswith(f"{key}.") for key in typed):
            problems.append(Problem(f"{name}: a recipe may not name code", where, command=TRUST))
    return problems


def stays_in_working_folder(path: str) -> bool:
    """Whether `path` is inside the working folder, with symbolic links followed."""
    if "\0" in path:
        return False
    target = os.path.realpath(os.path.expanduser(path))
    return Path(target).is_relative_to(os.path.realpath(os.getcwd()))


def check_growth(recipes: Sequence[Mapping[str, Any]], where: str) -> list[Problem]:
    """Violations of the limits on how far the ${key} of a recipe and its parents expand.

    A value that names two others doubles their text, so a few dozen values fill any memory. recipes: the recipe and
    its parents as plain mappings, unresolved. The limits also end the walk through a key that refers to itself.
    """
    for recipe in recipes:
        size, left = 0, [(cast(Any, recipe), 0)]
        while left:
            node, depth = left.pop()
            if depth > CHAIN_LIMIT:
                cause = f"${{key}} leads through more than {CHAIN_LIMIT} others, or to itself; write the value"
                return [Problem(cause, where)]
            if isinstance(node, (Mapping, list)):
                left += [(value, depth) for value in (node.values() if isinstance(node, Mapping) else node)]
            for key in _KEY.findall(node) if isinstance(node, str) else ():
                values = [value for other in recipes if (value := _get(other, key)) is not None]
                size += _EACH + max([_ELSEWHERE, *(len(str(value)) for value in values)])
                left += [(value, depth + 1) for value in values]
            if size > EXPANSION_LIMIT:
                cause = f"the ${{key}} of this recipe expand to more than {EXPANSION_LIMIT:,} characters"
                return [Problem(cause, where)]
    return []


def _get(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _names_of_code(node: Any, name: str) -> Iterator[str]:
    """Dotted names of the keys that Hydra would execute (`_target_`, `_partial_`, ...)."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = f"{name}.{key}" if name else str(key)
            if is_instruction(str(key)):
                yield inner
            yield from _names_of_code(value, inner)
    elif isinstance(node, list):
        for value in node:
            yield from _names_of_code(value, name)


def is_instruction(key: str) -> bool:
    """Whether any part of a key has the form `_word_`, as Hydra's instructions have."""
    return any(len(part) > 2 and part.startswith("_") and part.endswith("_") for part in key.split("."))
