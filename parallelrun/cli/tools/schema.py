"""`parallelrun schema`: a JSON schema (draft 2020-12) of the configuration, for editors and other programs.

It is made from the keys that check every configuration, with the strategies, models and presets that are
installed, so that it cannot say anything else. What depends on several keys at once (degrees that divide, a batch) is
left to `plan`. The file formats: a whole configuration, a recipe, and an option of each group.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from parallelrun.base import registry
from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.tools.completion import values
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, Key, default_of, known_keys, nearest
from parallelrun.config.recipes import about
from parallelrun.config.schema.strategy_keys import SECTIONS, own_keys

DIALECT = "https://json-schema.org/draft/2020-12/schema"
RECIPE = "recipe"
_REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}  # ${key}: the value of another key
_TYPES: dict[str, Any] = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array",
                          "dict": "object", "Any": ["number", "string", "object"]}  # fmt: skip
_REGISTRIES = {"model.name": "models", "dataset.name": "datasets"}
_TWINS = {"strategy.router": "model.router"}  # holds values for the keys of another section


def main(words: list[str]) -> int:
    """`parallelrun schema [recipe | GROUP] [--config-dir FOLDER]`: print the schema of that kind of file."""
    parser = argparse.ArgumentParser(
        "parallelrun schema", description="Print a JSON schema of the configuration, for editors."
    )
    kinds = ", ".join(GROUPS)
    parser.add_argument("kind", nargs="?", help=f"the file's kind; default: a whole configuration. One of {kinds}")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="offer the options of your own folder, too")
    arguments = parser.parse_args(words)
    if arguments.kind not in (None, *GROUPS):
        suggestion = " or ".join(f"schema {kind}" for kind in nearest(arguments.kind, GROUPS) or GROUPS)
        raise ConfigError(Problem(f"schema {arguments.kind}: no such kind of file", "command line", suggestion))
    flags = ("--config-dir", arguments.config_dir) if arguments.config_dir else ()
    print(json.dumps(schema(arguments.kind, flags), indent=1))
    return EXIT_OK


def schema(kind: str | None = None, flags: Iterable[str] = ()) -> dict[str, Any]:
    """The schema of a kind of file: None: a whole configuration; `recipe`; or the option of a group.

    flags: Hydra's flags, of which `--config-dir` adds the options and groups of the user's own folder.
    """
    folder = tuple(flags)
    if kind in (None, RECIPE):
        node = _nested(known_keys().values(), "")
        about_node = _nested(about.known().values(), f"{about.KEY}.")
        node["properties"] |= {"defaults": _defaults(folder, kind == RECIPE), about.KEY: about_node}
        if kind is None:
            node["properties"]["hydra"] = {"type": "object", "description": "Hydra's own settings; in no recipe"}
        title = "a recipe" if kind else "a configuration"
    else:
        node = _nested(known_keys().values(), f"{kind}.")
        node["properties"]["defaults"] = {"type": "array", "description": "Hydra's defaults: options to build on"}
        title = f"an option of the group {kind}"
    return {"$schema": DIALECT, "title": f"parallelrun: {title}", **node}


def _nested(keys: Iterable[Key], prefix: str) -> dict[str, Any]:
    """The schema of the section whose keys begin with `prefix`. A strategy that is named limits the keys beside it."""
    root = _object()
    for key in keys:
        if not key.name.startswith(prefix):
            continue
        *path, last = key.name.removeprefix(prefix).split(".")
        node, section = root, prefix
        for part in path:
            section += f"{part}."
            node = node["properties"].setdefault(part, _object(section))
        node["properties"][last] = _described(key, _value(key))
    return root


def _object(section: str = "") -> dict[str, Any]:
    axis = section.removeprefix("strategy.").rstrip(".")
    limits = {"allOf": [_only(axis, kind) for kind in _kinds(axis)]} if axis in SECTIONS else {}
    return {"type": "object", "properties": {}, "additionalProperties": False, **limits}


def _only(axis: str, kind: str) -> dict[str, Any]:
    """Where a file names the strategy, the keys of other strategies are wrong."""
    named = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
    return {"if": named, "then": {"propertyNames": {"enum": sorted(own_keys(axis, kind))}}}


def _kinds(axis: str) -> list[str]:
    """The strategies of an axis that a file may name."""
    return [name.partition(".")[2] for name in registry.names("strategies") if name.startswith(f"{axis}.")]


def _described(key: Key, node: dict[str, Any]) -> dict[str, Any]:
    """`node` with the help, the unit and the default of a key, and which strategies read it."""
    axis, _, own = key.name.removeprefix("strategy.").partition(".")
    readers = [kind for kind in _kinds(axis) if own in own_keys(axis, kind)] if axis in SECTIONS else []
    shared = not readers or own in {field.name for field in dataclasses.fields(SECTIONS[axis])}
    parts = [key.help, f"in {key.unit}" if key.unit else "", "" if shared else f"read by {', '.join(readers)}"]
    text, default = "; ".join(part for part in parts if part), default_of(key.name, None)
    has_default = default is not None and not isinstance(default, (list, dict))
    return {**node, **({"description": text} if text else {}), **({"default": default} if has_default else {})}


def _value(key: Key) -> dict[str, Any]:
    """The schema of a value: its type with the key's bounds or choices, null where it is allowed, or ${another.key}."""
    if key.name in _TWINS:
        return _nested(known_keys().values(), f"{_TWINS[key.name]}.")
    bounds, choices = _bounds(key), _choices(key)
    node: dict[str, Any] = {"type": _TYPES[key.kind]}
    if choices:
        node = {"enum": [*choices, *([None] if key.optional else [])]}
    elif key.kind == "list":
        node["items"] = {**({"type": _TYPES[key.item]} if key.item not in ("", "Any") else {}), **bounds}
    elif key.kind in ("dict", "Any"):
        node |= {"additionalProperties": bounds, **(bounds if key.kind == "Any" else {})}
    else:
        node |= bounds
    if key.optional and not choices:
        node["type"] = [*(node["type"] if isinstance(node["type"], list) else [node["type"]]), "null"]
    return {"anyOf": [node, _REFERENCE]} if node.get("type") != "string" else node


def _bounds(key: Key) -> dict[str, Any]:
    bounds = {"minimum": key.least, "exclusiveMinimum": key.above, "maximum": key.most, "exclusiveMaximum": key.below}
    if key.plausible and key.least != 0:  # what may be 0 may also be any plausible number
        bounds["minimum"] = key.plausible[0]
    if key.plausible:
        bounds["maximum"] = key.plausible[1]
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _choices(key: Key) -> list[str]:
    """The values of a key that takes a name; [] if it takes any text or number."""
    if key.name in _REGISTRIES:
        return list(registry.names(_REGISTRIES[key.name]))
    axis, _, last = key.name.removeprefix("strategy.").partition(".")
    if axis in SECTIONS and last == "kind":
        return _kinds(axis)
    if key.kind != "str" or key.name == "resume":  # which may also be a directory
        return []
    return values(key.name) or list(key.choices)


def _defaults(flags: tuple[str, ...], is_recipe: bool) -> dict[str, Any]:
    """The schema of Hydra's defaults list: `override /model: gpt` with the options of the group, or a parent."""
    patterns: dict[str, Any] = {}
    for group in GROUPS:
        options = sorted({*presets.options(group), *presets.user_options(flags, group)})
        written = "/?recipe" if group == RECIPE else f"override +/?{group}"
        patterns[f"^{written}$"] = {"enum": options}
    if not is_recipe:
        patterns |= {r"^(override +)?/?hydra/.+$": {"type": ["string", "null"]}}
        patterns |= {f"^(optional +)?/?{group}$": {} for group in presets.user_groups(flags)}
    entry = {"type": "object", "patternProperties": patterns, "additionalProperties": False}
    text = "the options of the groups, as `- override /model: gpt`, and other recipes to build on, by name"
    return {"type": "array", "items": {"anyOf": [{"type": "string"}, entry]}, "description": text}
