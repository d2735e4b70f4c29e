"""`parallelrun schema`: a JSON schema (draft 2020-12) of the configuration, for editors and other programs.

It is made from the dataclasses that check every configuration, with the strategies, models and presets that are
installed, so that it cannot say anything else. What depends on several keys at once (degrees that divide, a batch) is
left to `plan`. The file formats: a whole configuration, a recipe, and an option of each group.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Iterable
from typing import Any

from parallelrun.base import registry
from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.tools.completion import values
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, Key, known_keys, nearest
from parallelrun.config.recipes import about
from parallelrun.config.schema.strategy_keys import SECTIONS, complete_class, own_keys

DIALECT = "https://json-schema.org/draft/2020-12/schema"
RECIPE = "recipe"
_REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}  # ${key}: the value of another key
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
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
        node = _node(complete_class(), "")
        node["properties"] |= {"defaults": _defaults(folder, kind == RECIPE), about.KEY: _node(about.About, "about.")}
        if kind is None:
            node["properties"]["hydra"] = {"type": "object", "description": "Hydra's own settings; in no recipe"}
        return _document(f"parallelrun: {'a recipe' if kind else 'a configuration'}", node)
    node = _node(_section(kind), f"{kind}.")
    node["properties"]["defaults"] = {"type": "array", "description": "Hydra's defaults: options to build on"}
    return _document(f"parallelrun: an option of the group {kind}", node)


def _document(title: str, node: dict[str, Any]) -> dict[str, Any]:
    return {"$schema": DIALECT, "title": title, **node}


def _section(group: str) -> type:
    return typing.cast(type, typing.get_type_hints(complete_class())[group])


def _node(cls: type, prefix: str) -> dict[str, Any]:
    """The schema of a dataclass whose keys begin with `prefix`. A strategy that is named limits the keys beside it."""
    hints = typing.get_type_hints(cls)
    properties: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        hint, name = hints[item.name], f"{prefix}{item.name}"
        if dataclasses.is_dataclass(hint):
            properties[item.name] = _node(typing.cast(type, hint), f"{name}.")
        elif name in _TWINS:
            twin = typing.get_type_hints(_section(_TWINS[name].partition(".")[0]))[_TWINS[name].rpartition(".")[2]]
            properties[item.name] = _described(item, _node(twin, f"{_TWINS[name]}."), name)
        else:
            properties[item.name] = _described(item, _value(hint, _key(name, item)), name)
    node: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    text = (cls.__doc__ or "").partition("\n")[0]
    if text and not text.startswith(cls.__name__):  # a dataclass without a docstring has its signature there
        node["description"] = text
    axis = prefix.removeprefix("strategy.").rstrip(".")
    if prefix.startswith("strategy.") and axis in SECTIONS:
        node["allOf"] = [_only(axis, kind) for kind in _kinds(axis)]
    return node


def _only(axis: str, kind: str) -> dict[str, Any]:
    """Where a file names the strategy, the keys of other strategies are wrong."""
    named = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
    return {"if": named, "then": {"propertyNames": {"enum": sorted(own_keys(axis, kind))}}}


def _key(name: str, item: dataclasses.Field[Any]) -> Key:
    return known_keys().get(name) or Key(name, "str", True, **item.metadata)


def _kinds(axis: str) -> list[str]:
    """The strategies of an axis that a file may name."""
    return [name.partition(".")[2] for name in registry.names("strategies") if name.startswith(f"{axis}.")]


def _described(item: dataclasses.Field[Any], node: dict[str, Any], name: str) -> dict[str, Any]:
    """`node` with the help, the unit and the default of a field, and which strategies read it."""
    help_text, unit = item.metadata.get("help", ""), item.metadata.get("unit", "")
    _, _, axis_key = name.partition("strategy.")
    axis, _, key = axis_key.partition(".")
    readers = [kind for kind in _kinds(axis) if key in own_keys(axis, kind)] if axis in SECTIONS else []
    shared = not readers or key in {field.name for field in dataclasses.fields(SECTIONS[axis])}
    parts = [help_text, f"in {unit}" if unit else "", "" if shared else f"read by {', '.join(readers)}"]
    text = "; ".join(part for part in parts if part)
    default = None if item.default is dataclasses.MISSING else item.default
    return {**node, **({"description": text} if text else {}), **({"default": default} if default is not None else {})}


def _value(hint: Any, key: Key) -> dict[str, Any]:
    """The schema of a value: its type with the key's bounds or choices, null where it is allowed, or ${another.key}."""
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    optional = type(None) in alternatives or hint is typing.Any
    wanted = next(part for part in alternatives if part is not type(None))
    of = typing.get_origin(wanted) or wanted
    node: dict[str, Any]
    if wanted is typing.Any:
        node = {"type": ["number", "string", "object"], **_bounds(key), "additionalProperties": _bounds(key)}
    elif of in (list, dict):
        inner = typing.get_args(wanted)
        item = {**_type(inner[-1]), **_bounds(key)} if inner else {}
        node = {"type": "array", "items": item} if of is list else {"type": "object", "additionalProperties": item}
    else:
        node = {**_type(wanted), **_bounds(key)}
    choices = _choices(key)
    if choices:
        node = {"enum": [*choices, *([None] if optional else [])]}
    elif optional:
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        node["type"] = [*kinds, "null"]
    return {"anyOf": [node, _REFERENCE]} if node.get("type") != "string" else node


def _type(hint: Any) -> dict[str, Any]:
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


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
