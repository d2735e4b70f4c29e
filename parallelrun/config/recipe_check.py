"""The rules that a recipe's YAML must obey, node by node, so that every problem has its file and line. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from parallelrun.config.keys import GROUPS, Key, in_mapping, known_keys, nearest, nearest_keys, sections
from parallelrun.config.recipe_result import TRUST, WRITTEN_KEYS, is_instruction
from parallelrun.config.recipes import NAME
from parallelrun.config.values import string_trap, trap
from parallelrun.errors import ConfigError, Problem

DEPTH_LIMIT = 32
NODE_LIMIT = 2000  # keys and values; the largest recipe of ours has 60
_PLAIN_INTERPOLATION = re.compile(r"\$\{(?!hydra\b)[A-Za-z_][A-Za-z0-9_.]*\}")
_CHOICE = re.compile(r"(override +)?/?([a-z]+)")
_TEXT_TAG = "tag:yaml.org,2002:str"
_ARTICLES = {"int": "a number", "float": "a number", "bool": "a truth value", "null": "nothing"}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str, shown: str) -> yaml.Node:
    """The one document of `text`, after its events are known to be few, shallow and plain."""
    try:
        _check_events(text, shown)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark else shown
        raise ConfigError(Problem(f"not YAML: {getattr(error, 'problem', None) or error}", where)) from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        raise ConfigError(Problem("the recipe is empty", shown))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(Problem("a recipe is a list of `key: value` lines", _where(shown, root)))
    return root


def _check_events(text: str, shown: str) -> None:
    depth = documents = nodes = 0
    for event in yaml.parse(text, Loader=_LOADER):
        where = f"{shown}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(Problem("a recipe is one document; this file holds several", where))
        elif isinstance(event, yaml.AliasEvent):
            raise ConfigError(Problem("anchors and aliases are not read; use ${key}", where))
        elif isinstance(event, (yaml.CollectionStartEvent, yaml.ScalarEvent)) and event.tag:
            raise ConfigError(Problem(f"tags are not read: {event.tag}", where))
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > NODE_LIMIT:
            raise ConfigError(Problem(f"a recipe has at most {NODE_LIMIT} keys and values", where))
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > DEPTH_LIMIT:
                raise ConfigError(Problem(f"nested deeper than {DEPTH_LIMIT} levels", where))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _where(shown: str, node: yaml.Node) -> str:
    return f"{shown}:{node.start_mark.line + 1}"


class Check:
    """Walks a recipe's nodes, collecting its keys, its parents and every problem."""

    def __init__(self, shown: str, trusted: bool):
        self.shown = shown
        self.trusted = trusted
        self.problems: list[Problem] = []
        self.keys: set[str] = set()
        self.parents: list[str] = []
        self.chosen: dict[str, int] = {}  # group -> its line

    def root(self, node: yaml.Node) -> None:
        assert isinstance(node, yaml.MappingNode)
        for name, key_node, value in self._entries(node):
            if name == "defaults":
                self._defaults(value)
            elif name == "hydra":
                self._refuse("a recipe may not set hydra", key_node)
            else:
                self._value(name, key_node, value)

    def _report(self, what: str, node: yaml.Node, suggestion: str = "") -> None:
        self.problems.append(Problem(what, _where(self.shown, node), suggestion))

    def _refuse(self, what: str, node: yaml.Node) -> None:
        if not self.trusted:
            self.problems.append(Problem(what, _where(self.shown, node), command=TRUST))

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report("a key must be a plain word", key_node)
                continue
            name = key_node.value
            if name in seen:
                self._report(f"{name}: given twice, first on line {seen[name]}", key_node)
            seen[name] = key_node.start_mark.line + 1
            self._text(name, key_node)
            yield name, key_node, value

    def _defaults(self, node: yaml.Node) -> None:
        if not isinstance(node, yaml.SequenceNode):
            self._report("defaults must be a list", node)
            return
        for item in node.value:
            if isinstance(item, yaml.ScalarNode):
                if item.value != "_self_":
                    self._parent(item)
                continue
            if not isinstance(item, yaml.MappingNode):
                self._report("an entry of defaults is a name or `override /group: option`", item)
                continue
            for name, key_node, value in self._entries(item):
                self._default(name, key_node, value)

    def _default(self, name: str, key_node: yaml.Node, value: yaml.Node) -> None:
        match = _CHOICE.fullmatch(name)
        group = match[2] if match else name.split()[-1].lstrip("/") if name.split() else ""
        if not isinstance(value, yaml.ScalarNode):
            self._report(f"{name}: one option", value)
            return
        self._text(value.value, value)
        if group.split("/")[0] == "hydra":
            self._refuse(f"a recipe may not choose {group}", key_node)
        elif "@" in name:
            self._report(f"{name}: a recipe chooses the options of groups, without @package", key_node)
        elif group == "recipe":
            self._parent(value)
        elif group not in GROUPS:
            self._report(f"{group}: no such group", key_node, ", ".join(nearest(group, GROUPS)))
        elif match is None or not match[1]:
            self._report(f"{name}: the group is chosen already; override it", key_node, f"override /{group}")
        elif group in self.chosen:
            line = self.chosen[group]
            self._report(f"{name}: {value.value}: {group} is chosen twice, first on line {line}", key_node)
        elif self._is_option_name(value, f"{name}: {value.value}", f"an option of {group}"):
            self.chosen[group] = key_node.start_mark.line + 1
            self.keys.add(group)

    def _is_option_name(self, node: yaml.ScalarNode, shown: str, kind: str) -> bool:
        """Whether an option is chosen by a plain name: no number, no null, nothing that leads into other folders."""
        if not node.style and node.tag != _TEXT_TAG:
            read_as = node.tag.rpartition(":")[2]
            self._report(f"{shown[:80]}: {kind} is a name, and this is {_ARTICLES.get(read_as, read_as)}", node)
        elif not NAME.fullmatch(node.value):
            self._report(f"{shown[:80]}: {kind} is a plain name: letters, digits, '_', '-' and '.'", node)
        else:
            return True
        return False

    def _parent(self, node: yaml.ScalarNode) -> None:
        name = node.value.lstrip("/").removeprefix("recipe/")
        if node.value.startswith("/") and not node.value.startswith("/recipe/"):
            self._report(f"{node.value}: a recipe builds on other recipes only", node, name)
        elif (not node.style and node.tag != _TEXT_TAG) or not NAME.fullmatch(name):
            self._report(f"{node.value[:80]}: a recipe may build on another recipe only by its name", node)
        else:
            self.parents.append(name)

    def _value(self, name: str, key_node: yaml.Node, value: yaml.Node) -> None:
        if is_instruction(name):
            self._refuse(f"{name}: a recipe may not name code", key_node)
            if not self.trusted:
                return
        if "." in key_node.value and not in_mapping(name):
            self._report(f"{key_node.value}: write nested keys on lines of their own", key_node)
        elif name in known_keys():
            self._leaf(known_keys()[name], key_node, value)
        elif name in GROUPS and isinstance(value, yaml.ScalarNode):
            fix = f"defaults: [override /{name}: {value.value}]"
            self._report(f"{name}: a group is chosen in defaults", key_node, fix)
        elif name in sections() and isinstance(value, yaml.MappingNode):
            for inner, inner_node, inner_value in self._entries(value):
                self._value(f"{name}.{inner}", inner_node, inner_value)
        elif name in sections():
            self._report(f"{name} holds keys, not a value", key_node)
        elif in_mapping(name):
            self.keys.add(name)
            self._scan(value)
        else:
            self._report(f"{name}: no such key", key_node, ", ".join(nearest_keys(name)))

    def _leaf(self, key: Key, key_node: yaml.Node, value: yaml.Node) -> None:
        self.keys.add(key.name)
        is_null = isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null")
        if is_null and key.optional:
            return
        if key.name == "model.source":
            self._refuse("model.source: a recipe may not name code", key_node)
        if key.kind in ("list", "dict"):
            wanted = yaml.SequenceNode if key.kind == "list" else yaml.MappingNode
            if not isinstance(value, wanted):
                self._report(f"{key.name}: must be a {'list' if key.kind == 'list' else 'mapping'}", key_node)
            self._scan(value)
            return
        if not isinstance(value, yaml.ScalarNode):
            self._report(f"{key.name}: one value, not a {value.id}", key_node)
            return
        self._text(value.value, value)
        if "${" in value.value:
            return
        where = _where(self.shown, value)
        if not value.style:  # plain; libyaml says "", PyYAML None
            problem = trap(key, value.value or "null", where)
            if problem is None and key.kind == "str":
                problem = string_trap(key, value.value, where)
            if problem:
                self.problems.append(problem)
        elif key.kind != "str":
            problem = trap(key, value.value, where)
            if problem:
                self.problems.append(problem)
        climbs = os.path.isabs(value.value) or value.value.startswith("~") or ".." in Path(value.value).parts
        if key.name in WRITTEN_KEYS and climbs:
            self._refuse(f"{key.name}: a recipe may not write outside the working folder", key_node)

    def _scan(self, node: yaml.Node) -> None:
        """Check the texts below an open mapping or a list."""
        if isinstance(node, yaml.MappingNode):
            for name, key_node, value in self._entries(node):
                if is_instruction(name):
                    self._refuse(f"{name}: a recipe may not name code", key_node)
                self._scan(value)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                self._scan(value)
        elif isinstance(node, yaml.ScalarNode):
            self._text(node.value, node)

    def _text(self, text: str, node: yaml.Node) -> None:
        rest = _PLAIN_INTERPOLATION.sub("", text)
        if "${" in rest:
            self._refuse(f"{text.strip()[:60]}: only plain ${{key}} is read", node)
