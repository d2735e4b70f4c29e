"""Overrides `key=value` read and checked before Hydra parses them, and written again so that Hydra reads them right.

Hydra alone accepts `+nosuch=foo`, keeps the last of `tp=8 tp=4`, reads `compile=2` as true, and trips over a path with
a comma or a space. No Hydra, no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from parallelrun.config import recipes
from parallelrun.config.keys import GROUPS, MAPPINGS, PATH_KEYS, in_mapping, known_keys, nearest_keys, sections
from parallelrun.config.values import trap
from parallelrun.errors import Problem

_OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+|)(?P<key>[^=\s@]+)(?P<package>@[^=]*)?(?:=(?P<value>.*))?$", re.DOTALL)
_SWEEP_CALL = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list)\(.*\)$", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override. text: as typed; key: without sign and package; values: unquoted, several when swept."""

    text: str
    sign: str
    key: str
    package: str
    value: str
    multirun: bool

    @property
    def is_hydra(self) -> bool:
        return self.key == "hydra" or self.key.startswith(("hydra.", "hydra/"))

    @property
    def values(self) -> list[str]:
        """The values written out by hand; a sweep function such as range(1,4) is one value."""
        return split(self.value) if self.multirun else [self.value]

    def hydra(self) -> str:
        """The override as Hydra must read it: paths and texts quoted, `~` expanded, own mappings opened."""
        key = known_keys().get(self.key)
        if self.is_hydra or (self.key in GROUPS and self.key != "recipe"):
            return self.text
        sign = "++" if in_mapping(self.key) or self.key in MAPPINGS else self.sign
        if self.key != "recipe" and (key is None or key.kind != "str"):
            return f"{sign}{self.key}{self.package}={self.value}"
        values = [quote(value, self.key in PATH_KEYS) for value in self.values]
        return f"{sign}{self.key}{self.package}={','.join(values)}"


def read(texts: list[str], multirun: bool, where: str) -> tuple[list[Override], list[Problem]]:
    """(the overrides, every problem that can be told without composing)."""
    found: list[Override] = []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for text in texts:
        match = _OVERRIDE.match(text)
        if match is None:
            parts = [part.strip() for part in text.split("=", 1)]
            problems.append(Problem(f"{text}: not key=value", where, "=".join(parts) if all(parts) else ""))
            continue
        sign, key, package, value = (match[name] or "" for name in ("sign", "key", "package", "value"))
        override = Override(text, sign, "dataset.path" if key == "path" else key, package, value, multirun)
        found.append(override)
        if override.is_hydra:
            continue
        if override.key in seen:
            problems.append(Problem(f"{override.key} is given twice: {seen[override.key]} and {text}", where))
        seen[override.key] = text
        problems += _check(override, where)
    return found, problems


def suggest_keys(word: str) -> list[str]:
    """The keys and groups most like `word`."""
    return nearest_keys(word)


def split(value: str) -> list[str]:
    """`value` at its commas outside quotes and brackets."""
    parts, depth, quote_mark, start = [], 0, "", 0
    for index, character in enumerate(value):
        if quote_mark:
            if character == quote_mark and value[index - 1] != "\\":
                quote_mark = ""
        elif character in "'\"":
            quote_mark = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(value[start:index])
            start = index + 1
    return [*parts, value[start:]]


def unquoted(value: str) -> str:
    """The text inside quotes, or `value`."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("\\" + value[0], value[0])
    return value


def quote(value: str, is_path: bool) -> str:
    """`value` as a quoted text of Hydra's grammar; null, quoted values, sweeps and interpolations stay as they are."""
    if value.lower() == "null" or value[:1] in ("'", '"') or _SWEEP_CALL.match(value) or value.startswith("${"):
        return value
    if is_path:
        value = os.path.expanduser(value)
    # In Hydra's grammar a backslash is itself unless it stands before a quote.
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    trailing = re.search(r"\\*$", escaped)
    assert trailing is not None
    return f"'{escaped}{trailing[0]}'"


def _check(override: Override, where: str) -> list[Problem]:
    key, text = override.key, override.text
    if override.sign == "~":
        return [Problem(f"{text}: a key is not taken out; write null", where, f"{key}=null")]
    if key in GROUPS:
        return _group(override, where)
    if key in sections():
        inner = [name for name in known_keys() if name.startswith(key + ".")][:3]
        return [Problem(f"{text}: {key} holds keys", where, ", ".join(f"{name}=..." for name in inner))]
    if key not in known_keys():
        if in_mapping(key):
            return []
        suggestion = ", ".join(suggest_keys(key))
        return [Problem(f"{text}: no such key: {key}", where, suggestion, "parallelrun --help")]
    if "=" not in text:
        return [Problem(f"{text}: a value is missing", where, f"{key}=...")]
    if known_keys()[key].kind == "str" and key not in PATH_KEYS:
        problems = _several(override, where)
        if problems:
            return problems
    problems = []
    opening = "[" if key in MAPPINGS else "[{"
    if known_keys()[key].kind not in ("list", "dict") and override.value[:1] and override.value[0] in opening:
        return [Problem(f"{text}: one value, not a list", where)]
    for value in override.values:
        problem = None if _is_left_to_hydra(value) else trap(known_keys()[key], unquoted(value).strip(), where)
        if problem is not None:
            problems += _several(override, where) or [problem]
    return problems


def _several(override: Override, where: str) -> list[Problem]:
    """Values with commas outside a sweep."""
    value = override.value
    if override.multirun or len(split(value)) == 1 or value[0] in "[{":
        return []
    return [
        Problem(f"{override.text}: several values are a sweep", where, command=f"parallelrun -m ... {override.text}")
    ]


def _group(override: Override, where: str) -> list[Problem]:
    key, value = override.key, override.value
    if override.sign == "+":
        return [Problem(f"{override.text}: {key} is chosen already; write it without +", where, f"{key}={value}")]
    if not value:
        return [Problem(f"{override.text}: a name is missing", where, command=f"parallelrun ls {key}")]
    if not (key == "recipe" and recipes.is_path(value)) and _several(override, where):
        return _several(override, where)
    climbing = [one for one in map(unquoted, override.values) if one.startswith("/") or ".." in one.split("/")]
    if key != "recipe" and climbing:
        what = f"{override.text}: a {key} is chosen by its name, and {climbing[0]} leads to another folder"
        return [Problem(what, where, command="parallelrun --config-dir FOLDER ..., for options of your own")]
    if value.lower() == "null" and key != "recipe":
        return [Problem(f"{override.text}: a {key} must be chosen", where, command=f"parallelrun ls {key}")]
    return []


def _is_left_to_hydra(value: str) -> bool:
    """Interpolations, sweep functions, lists and mappings are Hydra's to judge."""
    return value.startswith(("${", "[", "{")) or bool(_SWEEP_CALL.match(value))
