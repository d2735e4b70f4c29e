"""Overrides `key=value`: checked before Hydra parses them, and rewritten so that Hydra parses them correctly.

Hydra alone accepts `+nosuch=foo`, keeps the last of `tp=8 tp=4`, reads `compile=2` as true, and fails on a path with a
comma or a space.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from parallelrun.base.errors import Problem
from parallelrun.config import keys, presets
from parallelrun.config.keys import Key, example, known_keys
from parallelrun.config.recipes import recipe_files
from parallelrun.config.values import BOOLEANS, trap, within

_OVERRIDE = re.compile(r"(?P<sign>~|\+\+|\+|)(?P<key>[^=\s@]+)(?P<package>@[^=]*)?(?:=(?P<value>.*))?$", re.DOTALL)
_ENTRY = re.compile(r"""\s*(?P<key>"[^"]*"|'[^']*'|[^:"']+)\s*:(?P<value>.*)""", re.DOTALL)
# `from` is no name in Python.
SHORT_NAMES = {
    "path": "dataset.path",
    "tokenizer": "dataset.tokenizer",
    "init.from": "init.weights",
    "tracker": "tracker.use",
}
NAME_LISTS = {"tracker.use"}  # lists of names that may be typed as one name, or as `none`
_SWEEP_CALL = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list)\(.*\)$", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One override. text: as typed; key: without sign and package."""

    text: str
    sign: str
    key: str
    package: str
    value: str
    multirun: bool
    is_own_group: bool = False  # a group that only the user's own configuration folder has

    @property
    def is_hydra(self) -> bool:
        return self.key == "hydra" or self.key.startswith(("hydra.", "hydra/"))

    @property
    def values(self) -> list[str]:
        """The values of a sweep, or the one value; a sweep function such as range(1,4) counts as one."""
        return split(self.value) if self.multirun else [self.value]

    def hydra(self) -> str:
        """The override for Hydra: paths and texts quoted, `~` expanded, open mappings extended."""
        key = known_keys().get(self.key)
        if self.is_hydra or self.is_own_group or (self.key in keys.GROUPS and self.key != "recipe"):
            return self.text
        sign = "++" if keys.in_mapping(self.key) or self.key in keys.MAPPINGS else self.sign
        value = self.value
        if key is not None and key.kind == "dict" and value[:1] == "{" and value[-1:] == "}":
            value = mapping(value)
        elif self.key in NAME_LISTS:
            value = ",".join(map(name_list, self.values))
        elif self.key == "recipe" or (key is not None and key.kind == "str"):
            value = ",".join(quote(text, self.key in keys.PATH_KEYS) for text in self.values)
        return f"{sign}{self.key}{self.package}={value}"


def read(
    texts: list[str], multirun: bool, where: str, own_groups: Collection[str] = ()
) -> tuple[list[Override], list[Problem]]:
    """(the overrides, every problem that can be found without composing).

    own_groups: groups of the user's own configuration folder. Hydra checks their values. They are not in the defaults
    list, so Hydra expects them with `+`.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    seen: dict[str, str] = {}
    for text in texts:
        match = _OVERRIDE.match(text)
        if match is None:
            parts = [part.strip() for part in text.split("=", 1)]
            problems.append(Problem(f"{text}: not key=value", where, "=".join(parts) if all(parts) else ""))
            continue
        sign, key, package, value = (match[name] or "" for name in ("sign", "key", "package", "value"))
        name = SHORT_NAMES.get(key, key)
        override = Override(text, sign, name, package, value, multirun, name in own_groups)
        if key in own_groups and not sign:
            override = replace(override, text=f"+{text}", sign="+")
        overrides.append(override)
        if override.is_hydra:
            continue
        if name in seen:
            problems.append(Problem(f"{name} is given twice: {seen[name]} and {text}", where, text))
        seen[name] = text
        problems += check(override, where) if key not in own_groups else []
    return overrides, problems


def suggest_pairs(word: str, value: str) -> str:
    """`key=value` for the keys and groups closest to `word` that accept that value, or the closest `key=...`."""
    close = [word] if word in known_keys() or word in keys.GROUPS else keys.nearest_keys(word)
    pairs = [f"{key}={value}" for key in close if value and _accepts(key, value)]
    return " or ".join(pairs or [f"{key}=..." for key in close[:1]])


def _accepts(key: str, value: str) -> bool:
    if key in keys.GROUPS:
        return value in presets.options(key)
    if key not in known_keys() or key in keys.MAPPINGS:
        return False
    schema_key = known_keys()[key]
    if schema_key.choices and value not in schema_key.choices:
        return False
    is_within = schema_key.kind not in ("int", "float") or within(schema_key, value)
    return is_within and not check(Override(f"{key}={value}", "", key, "", value, False), "")


def split(value: str) -> list[str]:
    """`value` split at its commas, except those inside quotes and brackets."""
    parts, depth, quote_mark = [""], 0, ""
    for index, character in enumerate(value):
        if quote_mark:
            if character == quote_mark and value[index - 1] != "\\":
                quote_mark = ""
        elif character in "'\"":
            quote_mark = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quote_mark:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def unquoted(value: str) -> str:
    """`value` without surrounding quotes."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("\\" + value[0], value[0])
    return value


def mapping(value: str) -> str:
    """`{key: value, ...}` for Hydra's grammar, which has no quotes in keys, only escapes."""
    pairs = []
    for part in split(value[1:-1]):
        match = _ENTRY.fullmatch(part)
        if match is None:
            return value  # Hydra reports the error
        key = unquoted(match["key"].strip())
        escaped = re.sub(r"[\\()\[\]{}:=, \t]", lambda special: "\\" + special[0], key)
        pairs.append(f"{escaped}: {match['value'].strip()}")
    return "{" + ", ".join(pairs) + "}"


def name_list(value: str) -> str:
    """`[tensorboard]` for `tensorboard`, `[]` for `none`; other values as they are."""
    plain = re.fullmatch(r"[\w.-]+", value) and value.lower() != "null"
    return ("[]" if value.lower() == "none" else f"[{value}]") if plain else value


def quote(value: str, is_path: bool) -> str:
    """`value` quoted for Hydra's grammar, except null, quoted values, sweep functions and interpolations."""
    if value.lower() == "null" or value[:1] in ("'", '"') or _SWEEP_CALL.match(value) or value.startswith("${"):
        return value
    if is_path:
        value = os.path.expanduser(value)
    # Hydra's grammar reads backslashes literally, except in front of a quote.
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    trailing = escaped[len(escaped.rstrip("\\")) :]
    return f"'{escaped}{trailing}'"


def check(override: Override, where: str) -> list[Problem]:
    """The problems of one override that can be found without composing."""
    key, text, value = override.key, override.text, override.value
    schema_key = known_keys().get(key)
    if override.sign == "~":
        return [_deletion(override, where)]
    if key == "verb":
        return [Problem(f"{text}: the verb must be the first word", where, command="parallelrun --help")]
    if key in keys.GROUPS:
        return _check_group(override, where)
    if key in keys.sections():
        inner = [name for name in known_keys() if name.startswith(key + ".")][:3]
        return [Problem(f"{text}: {key} holds keys, not a value", where, " or ".join(f"{name}=..." for name in inner))]
    if schema_key is None:
        return [] if keys.in_mapping(key) else [_unknown(override, where, value)]
    if "=" not in text:
        return [Problem(f"{text}: a value is missing", where, f"{key}=...")]
    if (
        schema_key.kind == "str"
        and key not in keys.PATH_KEYS | keys.LIST_TEXTS
        and (several := _several(override, where))
    ):
        return several
    if key in NAME_LISTS and _several(override, where):
        return [Problem(f"{text}: several names are a list", where, f"{text.partition('=')[0]}=[{value}]")]
    opening = "[" if key in keys.MAPPINGS else "[{"
    if schema_key.kind not in ("list", "dict") and value[:1] and value[0] in opening:
        cause = f"{text}: {key} takes one value, not a {'list' if value[0] == '[' else 'mapping'}"
        return [Problem(cause, where, _first_value(value, schema_key))]
    if problem := _without_brackets(override, schema_key, where):
        return [problem]
    plain = [text for text in override.values if not text.startswith(("${", "[", "{")) and not _SWEEP_CALL.match(text)]
    traps = [trap(schema_key, unquoted(text).strip(), where) for text in plain]  # Hydra checks the other values
    problems = [problem for problem in traps if problem]
    return (_several(override, where) or problems) if problems else []


def _first_value(value: str, schema_key: Key) -> str:
    """`grid=2x4` for `[2,4]`, `tp=2` for `[2,4]`: what is typed for a key of one value instead of a list."""
    items = re.findall(r"[^\s,\[\]]+", value) if value[0] == "[" else []
    if schema_key.name.rpartition(".")[2] == "grid" and len(items) > 1:
        return f"{schema_key.name}={'x'.join(items[:2])}"
    fits = {"int": r"\d+", "float": r"[\d.e+-]+"}.get(schema_key.kind, "|".join(schema_key.choices) or r"[\w.:/-]+")
    return f"{schema_key.name}={items[0]}" if items and re.fullmatch(fits, items[0]) else example(schema_key)


def _without_brackets(override: Override, schema_key: Key, where: str) -> Problem | None:
    """The problem with `profile=3` for a list, or with `model.arguments=3` for a mapping."""
    kind, opening = {"list": ("list", "["), "dict": ("mapping", "{")}.get(schema_key.kind, ("", ""))
    bare = [text for text in override.values if not text.startswith((opening, "${")) and not _SWEEP_CALL.match(text)]
    if not kind or not bare or schema_key.name in NAME_LISTS or override.value.lower() == "null":
        return None
    shape = {"str": r"[\w.:,-]+", "int": r"[\d,]+"}.get(schema_key.item)
    fits = shape and re.fullmatch(shape, override.value) and override.value.lower() not in BOOLEANS
    fix = f"{schema_key.name}=[{override.value}]" if fits else example(schema_key)
    return Problem(f"{override.text}: {schema_key.name} takes a {kind}: {schema_key.help}", where, fix)


def _unknown(override: Override, where: str, value: str) -> Problem:
    cause, fixes = f"{override.text}: no such key: {override.key}", suggest_pairs(override.key, value)
    return Problem(cause, where, fixes, "parallelrun --help")


def _deletion(override: Override, where: str) -> Problem:
    """The problem with `~key`: keys cannot be deleted, only set to null."""
    key, schema_key = override.key, known_keys().get(override.key)
    typed = override.text.lstrip("~").partition("=")[0]
    if schema_key is None and key not in keys.GROUPS and key not in keys.sections():
        return _unknown(override, where, "")
    cause = f"{override.text}: a key cannot be removed from the configuration"
    may_be_null = schema_key is not None and schema_key.optional
    return Problem(cause, where, f"{key}=null" if may_be_null else f"leave {typed} out")


def _several(override: Override, where: str) -> list[Problem]:
    """The problem with comma-separated values outside a sweep, if there are any."""
    if override.multirun or len(split(override.value)) == 1 or override.value[0] in "[{":
        return []
    cause = f"{override.text}: several values need a sweep (-m)"
    return [Problem(cause, where, command=f"parallelrun -m ... {override.text}")]


def _check_group(override: Override, where: str) -> list[Problem]:
    key, text, value = override.key, override.text, override.value
    climbing = [name for name in map(unquoted, override.values) if name.startswith("/") or ".." in name.split("/")]
    if override.sign == "+":
        return [Problem(f"{text}: every run has a {key} already; write it without +", where, f"{key}={value}")]
    if not value:
        return [Problem(f"{text}: a name is missing", where, command=f"parallelrun ls {key}")]
    if not (key == "recipe" and recipe_files.is_path(value)) and (several := _several(override, where)):
        return several
    if key != "recipe" and climbing:
        cause = f"{text}: choose a {key} by its name; {climbing[0]} points to another folder (--config-dir)"
        return [Problem(cause, where, command=f"parallelrun ls {key}")]
    if value.lower() == "null" and key != "recipe":
        return [Problem(f"{text}: a {key} must be chosen", where, command=f"parallelrun ls {key}")]
    return []
