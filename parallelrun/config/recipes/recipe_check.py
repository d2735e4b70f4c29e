"""The checks of a recipe's YAML, node by node, so that every problem is reported with file and line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import keys
from parallelrun.config.keys import Key, known_keys
from parallelrun.config.overrides import SHORT_NAMES
from parallelrun.config.recipes import about
from parallelrun.config.recipes.recipe_files import NAME
from parallelrun.config.recipes.untrusted import TRUST, WRITTEN_KEYS, is_instruction
from parallelrun.config.values import string_trap, trap

DEPTH_LIMIT = 32
NODE_LIMIT = 2000  # keys and values; our largest recipe has 60
_PLAIN_INTERPOLATION = re.compile(r"\$\{(?!hydra\b)[A-Za-z_][A-Za-z0-9_.]*\}")
_CHOICE = re.compile(r"(override +)?/?([a-z]+)")
_TEXT_TAG = "tag:yaml.org,2002:str"
_KINDS = {"int": "a number", "float": "a number", "bool": "a boolean"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has libyaml


def parse(text: str, shown: str) -> yaml.MappingNode:
    """Return the document of `text`. Raises ConfigError if it is too long or too deep, or has tags or aliases."""
    try:
        _check_events(text, shown)
        root = yaml.compose(text, Loader=LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}:{mark.column + 1}" if mark else shown
        raise ConfigError(Problem(f"not YAML: {getattr(error, 'problem', None) or error}", where)) from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        raise ConfigError(Problem("the recipe is empty", shown))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(Problem("a recipe must consist of `key: value` lines", _where(shown, root)))
    return root


def _check_events(text: str, shown: str) -> None:
    depth = documents = nodes = 0
    for event in yaml.parse(text, Loader=LOADER):
        documents += isinstance(event, yaml.DocumentStartEvent)
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        cause = ""
        if documents > 1:
            cause = "a recipe is one document; this file holds several"
        elif isinstance(event, yaml.AliasEvent):
            cause = "anchors and aliases are not supported; use ${key}"
        elif isinstance(event, (yaml.CollectionStartEvent, yaml.ScalarEvent)) and event.tag:
            cause = f"tags are not supported: {event.tag}"
        elif nodes > NODE_LIMIT:
            cause = f"a recipe has at most {NODE_LIMIT} keys and values"
        elif depth > DEPTH_LIMIT:
            cause = f"nested deeper than {DEPTH_LIMIT} levels"
        if cause:
            raise ConfigError(Problem(cause, f"{shown}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"))


def _where(shown: str, node: yaml.Node) -> str:
    return f"{shown}:{node.start_mark.line + 1}"


def _is_plain_non_text(node: yaml.ScalarNode) -> bool:
    """Whether YAML reads an unquoted scalar as a number, a boolean or null."""
    return not node.style and node.tag != _TEXT_TAG


class RecipeCheck:
    """Walks a recipe's nodes and collects its keys, its parents and every problem."""

    def __init__(
        self,
        shown: str,
        trusted: bool,
        known: Mapping[str, Key] | None = None,
        of_sections: frozenset[str] | None = None,
    ):
        self.shown = shown
        self.trusted = trusted
        self.known = known_keys() if known is None else known
        self.sections = keys.sections() if of_sections is None else of_sections
        self.problems: list[Problem] = []
        self.keys: set[str] = set()
        self.about: about.About | None = None
        self.parents: list[str] = []
        self.chosen: dict[str, int] = {}  # group -> its line
        self.lines: dict[str, int] = {}  # key -> its line

    def root(self, node: yaml.MappingNode) -> None:
        """Check a whole recipe."""
        for name, key_node, value in self._entries(node):
            if name == "defaults":
                self._defaults(value)
            elif name == "hydra":
                self._refuse("a recipe may not set hydra", key_node)
            elif name == about.KEY:
                self._about(key_node, value)
            else:
                self._value(name, key_node, value)

    def _about(self, key_node: yaml.Node, node: yaml.Node) -> None:
        """Check what the recipe says about itself: with the same checks as its keys, but it sets none."""
        check = RecipeCheck(self.shown, self.trusted, about.known(), frozenset(about.sections()))
        check._value(about.KEY, key_node, node)
        self.problems += check.problems
        if not check.problems:
            values = yaml.SafeLoader("").construct_document(node)
            self.about = about.build(values)
            for name, wanted in about.problems(self.about):
                where = f"{self.shown}:{check.lines[name]}"
                self.problems.append(Problem(f"{name}: must be {wanted}", where))

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
            elif isinstance(item, yaml.MappingNode):
                for name, key_node, value in self._entries(item):
                    self._default(name, key_node, value)
            else:
                self._report("an entry of defaults must be a name or `override /group: option`", item)

    def _default(self, name: str, key_node: yaml.Node, value: yaml.Node) -> None:
        match = _CHOICE.fullmatch(name)
        group = match[2] if match else name.split()[-1].lstrip("/") if name.split() else ""
        if not isinstance(value, yaml.ScalarNode):
            self._report(f"{name}: choose one option", value)
            return
        self._text(value.value, value)
        if group.split("/")[0] == "hydra":
            self._refuse(f"a recipe may not choose {group}", key_node)
        elif "@" in name:
            self._report(f"{name}: a recipe chooses options of groups, without @package", key_node)
        elif group == "recipe":
            self._parent(value)
        elif group not in keys.GROUPS:
            self._report(f"{group}: no such group", key_node, ", ".join(keys.nearest(group, keys.GROUPS)))
        elif match is None or not match[1]:
            self._report(f"{name}: every run has this group already; write override", key_node, f"override /{group}")
        elif group in self.chosen:
            line = self.chosen[group]
            self._report(f"{name}: {value.value}: {group} is chosen twice, first on line {line}", key_node)
        elif _is_plain_non_text(value):
            read_as = value.tag.rpartition(":")[2]
            kind = _KINDS.get(read_as, read_as)
            self._report(f"{name}: {value.value}"[:80] + f": an option of {group} must be a name, not {kind}", value)
        elif not NAME.fullmatch(value.value):  # not a path to another folder
            plain = "must be a plain name of letters, digits, '_', '-' and '.'"
            self._report(f"{name}: {value.value}"[:80] + f": an option of {group} {plain}", value)
        else:
            self.chosen[group] = key_node.start_mark.line + 1
            self.keys.add(group)

    def _parent(self, node: yaml.ScalarNode) -> None:
        name = node.value.lstrip("/").removeprefix("recipe/")
        if node.value.startswith("/") and not node.value.startswith("/recipe/"):
            self._report(f"{node.value}: a recipe can only build on other recipes", node, name)
        elif _is_plain_non_text(node) or not NAME.fullmatch(name):
            self._report(f"{node.value[:80]}: a recipe may build on another recipe only by its name", node)
        else:
            self.parents.append(name)

    def _value(self, name: str, key_node: yaml.Node, value: yaml.Node) -> None:
        if is_instruction(name):
            self._refuse(f"{name}: a recipe may not name code", key_node)
            if not self.trusted:
                return
        if "." in key_node.value and not keys.in_mapping(name):
            self._report(f"{key_node.value}: write nested keys on separate lines", key_node)
        elif name in self.known:
            self._leaf(self.known[name], key_node, value)
        elif name in keys.GROUPS and isinstance(value, yaml.ScalarNode):
            fix = f"defaults: [override /{name}: {value.value}]"
            self._report(f"{name}: choose a group's option in defaults", key_node, fix)
        elif name in self.sections and isinstance(value, yaml.MappingNode):
            for inner, inner_node, inner_value in self._entries(value):
                self._value(f"{name}.{inner}", inner_node, inner_value)
        elif name in self.sections:
            section, _, inner = SHORT_NAMES.get(name, "").partition(".")
            fix = f"{section}: {{{inner}: ...}}" if inner else ""
            self._report(f"{name} holds keys, not a value", key_node, fix)
        elif keys.in_mapping(name):
            self.keys.add(name)
            self._scan(value)
        else:
            close = keys.nearest_keys(name) if self.known is known_keys() else keys.nearest(name, self.known)
            self._report(f"{name}: no such key", key_node, ", ".join(close))

    def _leaf(self, key: Key, key_node: yaml.Node, value: yaml.Node) -> None:
        self.keys.add(key.name)
        self.lines[key.name] = key_node.start_mark.line + 1
        if isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null") and key.optional:
            return
        if key.name in keys.CODE_KEYS:
            self._refuse(f"{key.name}: a recipe may not name code", key_node)
        wanted = {"list": yaml.SequenceNode, "dict": yaml.MappingNode}.get(key.kind)
        if key.name in keys.MAPPINGS and isinstance(value, yaml.MappingNode):  # it may be one value, too
            wanted = yaml.MappingNode
        if wanted is not None and not isinstance(value, wanted):
            self._report(f"{key.name}: must be a {'list' if key.kind == 'list' else 'mapping'}", key_node)
        elif wanted is None and not isinstance(value, yaml.ScalarNode):
            self._report(f"{key.name}: takes one value, not a {value.id}", key_node)
            return
        self._scan(value)
        if wanted is None and "${" not in value.value:
            self._scalar(key, key_node, value)

    def _scalar(self, key: Key, key_node: yaml.Node, value: yaml.ScalarNode) -> None:
        where, plain, text = _where(self.shown, value), not value.style, value.value
        problem = trap(key, text or ("null" if plain else ""), where) if plain or key.kind != "str" else None
        if plain and key.kind == "str" and problem is None:
            problem = string_trap(key, text, where)
        self.problems += [problem] if problem else []
        if key.name in WRITTEN_KEYS and (os.path.isabs(text) or text.startswith("~") or ".." in Path(text).parts):
            self._refuse(f"{key.name}: a recipe may not write outside the working folder", key_node)

    def _scan(self, node: yaml.Node) -> None:
        """Check the texts below a node."""
        if isinstance(node, yaml.MappingNode):
            for name, key_node, value in self._entries(node):
                if is_instruction(name):
                    self._refuse(f"{name}: a recipe may not name code", key_node)
                self._scan(value)
        for value in node.value if isinstance(node, yaml.SequenceNode) else ():
            self._scan(value)
        if isinstance(node, yaml.ScalarNode):
            self._text(node.value, node)

    def _text(self, text: str, node: yaml.Node) -> None:
        if "${" in _PLAIN_INTERPOLATION.sub("", text):
            self._refuse(f"{text.strip()[:60]}: a recipe may only use plain ${{key}}", node)
