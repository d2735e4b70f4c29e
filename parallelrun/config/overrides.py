"""Overrides `key=value` read and checked before Hydra parses them, and written again so that Hydra reads them right.

Hydra alone accepts `+nosuch=foo`, keeps the last of `tp=8 tp=4`, reads `compile=2` as true, and trips over a path with
a comma or a space. No Hydra, no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from parallelrun.config import recipes
from parallelrun.config.keys import (
    GROUPS,
    LIST_TEXTS,
    MAPPINGS,
    PATH_KEYS,
    in_mapping,
    known_keys,
    nearest_keys,
    sections,
)
from parallelrun.config.values import trap
from parallelrun.errors import Problem

_OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+|)(?P<key>[^=\s@]+)(?P<package>@[^=]*)?(?:=(?P<value>.*))?$", re.DOTALL)
_ENTRY = re.compile(r"""\s*(?P<key>"[^"]*"|'[^']*'|[^:"']+)\s*:(?P<value>.*)""", re.DOTALL)
_OF_PRESETS = ("name", "preset", "description", "verb", "demo", "own_axis", "router")  # keys that no user types
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
    is_own_group: bool = False  # of a group that only the user's own configuration folder has

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
        if self.is_hydra or self.is_own_group or (self.key in GROUPS and self.key != "recipe"):
            return self.text
        sign = "++" if in_mapping(self.key) or self.key in MAPPINGS else self.sign
        if key is not None and key.kind == "dict" and self.value[:1] == "{" and self.value[-1:] == "}":
            return f"{sign}{self.key}{self.package}={mapping(self.value)}"
        if self.key != "recipe" and (key is None or key.kind != "str"):
            return f"{sign}{self.key}{self.package}={self.value}"
        values = [quote(value, self.key in PATH_KEYS) for value in self.values]
        return f"{sign}{self.key}{self.package}={','.join(values)}"


def read(
    texts: list[str], multirun: bool, where: str, own_groups: Collection[str] = ()
) -> tuple[list[Override], list[Problem]]:
    """(the overrides, every problem that can be told without composing). own_groups: groups of the user's own
    configuration folder, which Hydra judges; they are no part of the defaults, so Hydra wants them added."""
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
        name = "dataset.path" if key == "path" else key
        override = Override(text, sign, name, package, value, multirun, name in own_groups)
        found.append(override)
        if override.is_hydra:
            continue
        if key in own_groups and not sign:
            found[-1] = override = replace(override, text=f"+{text}", sign="+")
        if override.key in seen:
            problems.append(Problem(f"{override.key} is given twice: {seen[override.key]} and {text}", where))
        seen[override.key] = text
        problems += _check(override, where) if key not in own_groups else []
    return found, problems


def suggest_keys(word: str) -> list[str]:
    """The keys and groups most like `word`, without those that only presets set."""
    return [key for key in nearest_keys(word) if key.rpartition(".")[2] not in _OF_PRESETS]


def suggest_pairs(word: str, value: str) -> str:
    """`key=value` for the keys and groups most like `word` that may have that value, one of them without, or ""."""
    keys = [word] if word in known_keys() or word in GROUPS else suggest_keys(word)
    pairs = [f"{key}={value}" for key in keys if value and _may_be(key, value)]
    return " or ".join(pairs or [f"{key}=..." for key in keys[:1]])


def _may_be(key: str, value: str) -> bool:
    if key in GROUPS:
        from parallelrun.config import presets  # here: it reads YAML, which takes its time

        return any(value == name for name in presets.options(key))
    if key not in known_keys() or key in MAPPINGS:
        return False
    return not _check(Override(f"{key}={value}", "", key, "", value, False), "")


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


def mapping(value: str) -> str:
    """`{key: value, ...}` with keys as Hydra's grammar takes them: it knows no quotes there, but escapes."""
    pairs = []
    for part in split(value[1:-1]):
        match = _ENTRY.fullmatch(part)
        if match is None:
            return value  # Hydra's to judge
        key = unquoted(match["key"].strip())
        escaped = re.sub(r"[\\()\[\]{}:=, \t]", lambda special: "\\" + special[0], key)
        pairs.append(f"{escaped}: {match['value'].strip()}")
    return "{" + ", ".join(pairs) + "}"


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
        return [_taken_out(override, where)]
    if key == "verb":
        return [Problem(f"{text}: the verb is the first word", where, command="parallelrun --help")]
    if key in GROUPS:
        return _group(override, where)
    if key in sections():
        inner = [name for name in known_keys() if name.startswith(key + ".")][:3]
        return [Problem(f"{text}: {key} holds keys", where, " or ".join(f"{name}=..." for name in inner))]
    if key not in known_keys():
        if in_mapping(key):
            return []
        suggestion = suggest_pairs(key, override.value)
        return [Problem(f"{text}: no such key: {key}", where, suggestion, "parallelrun --help")]
    if "=" not in text:
        return [Problem(f"{text}: a value is missing", where, f"{key}=...")]
    if known_keys()[key].kind == "str" and key not in PATH_KEYS | LIST_TEXTS:
        problems = _several(override, where)
        if problems:
            return problems
    problems = []
    opening = "[" if key in MAPPINGS else "[{"
    if known_keys()[key].kind not in ("list", "dict") and override.value[:1] and override.value[0] in opening:
        return [Problem(f"{text}: one value, not a {'list' if override.value[0] == '[' else 'mapping'}", where)]
    for value in override.values:
        problem = None if _is_left_to_hydra(value) else trap(known_keys()[key], unquoted(value).strip(), where)
        if problem is not None:
            problems += _several(override, where) or [problem]
    return problems


def _taken_out(override: Override, where: str) -> Problem:
    """`~key`: what stands for "without it" is null, where the key may be null."""
    key, known = override.key, known_keys().get(override.key)
    if known is None and key not in GROUPS and key not in sections():
        return Problem(f"{override.text}: no such key: {key}", where, suggest_pairs(key, ""), "parallelrun --help")
    what = f"{override.text}: a key is not taken out of the configuration"
    return Problem(what, where, f"{key}=null" if known is not None and known.optional else f"leave {key} out")


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
