"""What a recipe that nobody trusts may not bring about, checked on what was composed. No Hydra, no torch.

`recipe_check` reads a recipe's text. A text can hide where it leads: an interpolation, a model of another folder, a
symbolic link. So the composed values are checked as well, and how far the interpolations of a recipe grow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallelrun.config.schema import Config
from parallelrun.errors import Problem

TRUST = "parallelrun --trust ..., if you know what the recipe does"
WRITTEN_KEYS = ("runs", "plot", "sweep.directory", "sweep.resume")
EXPANSION_LIMIT = 10_000  # characters that the ${key} of a recipe stand for
CHAIN_LIMIT = 20  # ${key} that leads to a ${key} that leads to ...
_KEY = re.compile(r"\$\{([^${}]*)\}")
_EACH = 10  # characters that resolving one ${key} is taken for
_ELSEWHERE = 100  # characters that a key of another file is taken for


def check(config: Config, set_by_recipe: Set[str], typed: Set[str], where: str) -> list[Problem]:
    """Violations of an untrusted recipe in the configuration that it composes to.

    set_by_recipe: the keys and groups that the recipe sets; typed: those that the user typed, which are the user's.
    """
    problems = []
    fields = asdict(config)
    if config.model.source is not None and not typed & {"model", "model.source"}:
        problems.append(Problem("model.source: a recipe may not name code", where, command=TRUST))
    for key in WRITTEN_KEYS:
        value = _get(fields, key)
        if key in set_by_recipe - typed and value is not None and not stays_in_working_folder(str(value)):
            what = f"{key}={value}: a recipe may not write outside the working folder"
            problems.append(Problem(what, where, command=TRUST))
    for name in _names_of_code(fields, ""):
        if not any(name == key or name.startswith(f"{key}.") for key in typed):
            problems.append(Problem(f"{name}: a recipe may not name code", where, command=TRUST))
    return problems


def stays_in_working_folder(path: str) -> bool:
    """Whether what is written to `path` lies in the working folder, symbolic links followed."""
    if "\0" in path:
        return False
    place = os.path.realpath(os.path.expanduser(path))
    return Path(place).is_relative_to(os.path.realpath(os.getcwd()))


def check_growth(recipes: Sequence[Mapping[str, Any]], where: str) -> list[Problem]:
    """The ${key} of a recipe and of those it builds on: how much text they stand for together, and how deep they lead.

    A value that names two others doubles their text, and a few dozen such values fill any memory. recipes: as plain
    mappings, unresolved.
    """
    growth = _Growth(recipes)
    found = [growth.of_node(recipe, 0) for recipe in recipes]
    if any(depth > CHAIN_LIMIT for _, depth in found):
        return [Problem(f"a chain of more than {CHAIN_LIMIT} ${{key}}; write the value itself", where)]
    if any(size > EXPANSION_LIMIT for size, _ in found):
        what = f"the ${{key}} of this recipe stand for more than {EXPANSION_LIMIT:,} characters"
        return [Problem(what, where)]
    return []


class _Growth:
    """(characters that the interpolations of a node stand for, longest chain of them); of a key defined by several
    recipes the largest."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]]):
        self.recipes = recipes
        self._known: dict[str, tuple[int, int]] = {}

    def of_node(self, node: Any, depth: int) -> tuple[int, int]:
        if depth > CHAIN_LIMIT:
            return 0, CHAIN_LIMIT + 1
        if isinstance(node, Mapping):
            found = [self.of_node(value, depth) for value in node.values()]
        elif isinstance(node, list):
            found = [self.of_node(value, depth) for value in node]
        else:
            found = [self.of_key(key, depth) for key in _KEY.findall(node)] if isinstance(node, str) else []
        return sum(size for size, _ in found), max((chain for _, chain in found), default=0)

    def of_key(self, key: str, depth: int) -> tuple[int, int]:
        if key not in self._known:
            self._known[key] = 0, 0  # a key that leads back to itself: Hydra refuses it
            size, chain = _ELSEWHERE, 0
            for node in (_get(recipe, key) for recipe in self.recipes):
                inner, deeper = self.of_node(node, depth + 1)
                size, chain = max(size, len(str(node)) + inner), max(chain, deeper)
            self._known[key] = size + _EACH, chain + 1
        return self._known[key]


def _get(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _names_of_code(node: Any, name: str) -> Iterator[str]:
    """Dotted names of what Hydra would take for an instruction (`_target_`, `_partial_`, ...)."""
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
    """Whether any part of a key is written `_word_`, as Hydra writes what it obeys."""
    return any(len(part) > 2 and part.startswith("_") and part.endswith("_") for part in key.split("."))
