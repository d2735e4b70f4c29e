"""The options of every group, read from our YAML files and from the user's folders.

YAML is imported late: most command lines need none of this, and it is slow to import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.config import user_folders
from parallelrun.config.keys import GROUPS, known_keys, nearest
from parallelrun.config.recipes import recipe_files
from parallelrun.config.recipes.recipe_files import RecipeFile

CLUSTER = "cluster"


@dataclass(frozen=True)
class Option:
    """One option of a group. source: built-in | user."""

    name: str
    description: str
    source: str


MINE = "mine"  # the cluster that `parallelrun calibrate` writes unless it is given a name


def folder() -> Path:
    """The folder of the built-in groups."""
    return Path(import_module("parallelrun.conf").__path__[0])


def own_clusters() -> Path:
    """The folder in which `parallelrun calibrate` keeps the clusters of this user: every command line finds them.

    In $PARALLELRUN_CONFIG, else $XDG_CONFIG_HOME/parallelrun, else ~/.config/parallelrun. A user without a home
    directory (a container's, whose uid has no name) has none: `~` stays in the path, which is not absolute then.
    """
    home = os.environ.get("XDG_CONFIG_HOME", "")
    root = Path(
        home if os.path.isabs(home) else os.path.expanduser("~/.config")
    )  # the XDG base directory specification
    return Path(os.environ.get("PARALLELRUN_CONFIG") or root / "parallelrun") / CLUSTER


def own_file(group: str, name: str) -> Path | None:
    """The file of a cluster of the user's own; None where there is none, or a built-in one of that name."""
    if group != CLUSTER or not recipe_files.NAME.match(name) or (folder() / group / f"{name}.yaml").is_file():
        return None
    path = own_clusters() / f"{name}.yaml"
    return path if path.is_file() else None


def options(group: str) -> list[str]:
    """The sorted names of a group's built-in options; of recipes and clusters, the users' too."""
    if group == "recipe":
        return list(recipe_files.find())
    own = {path.stem for path in own_clusters().glob("*.yaml") if recipe_files.NAME.match(path.stem)}
    return sorted({path.stem for path in (folder() / group).glob("*.yaml")} | (own if group == CLUSTER else set()))


def unknown(group: str, name: str, options: Sequence[str]) -> Problem:
    """The problem of a name that is not one of the group's options."""
    close = nearest(name, options)
    suggestion = " or ".join(f"{group}={option}" for option in close)
    return Problem(f"{group}={name}: no such {group}", group, suggestion, f"parallelrun ls {group}")


def values(group: str, name: str) -> dict[str, Any]:
    """The content of an option. Raises ConfigError for an unknown name."""
    import yaml

    if name not in options(group):
        raise ConfigError(unknown(group, name, options(group)))
    path = own_file(group, name) or folder() / group / f"{name}.yaml"
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def described(group: str) -> list[Option]:
    """The options of a group with source and one-line description."""
    if group == "recipe":
        return [Option(file.name, file.description, file.source) for file in recipe_files.find().values()]
    return [
        Option(name, values(group, name).get("description", ""), "user" if own_file(group, name) else "built-in")
        for name in options(group)
    ]


def user_groups(words: Sequence[str]) -> frozenset[str]:
    """The groups that only the user's folders have, `experiment` and `experiment/vision` alike."""
    roots = user_folders.folders(words)
    groups = {path.parent.relative_to(root).as_posix() for root in roots for path in root.rglob("*.yaml")}
    return frozenset(name for name in groups if name != "." and name.split("/")[0] not in (*GROUPS, "recipes", "hydra"))


def mentions(words: Sequence[str], text: str) -> bool:
    """Whether any YAML file of the user's folders holds `text`."""
    files = (path for root in user_folders.folders(words) for path in root.rglob("*.yaml"))
    return any(text in path.read_text(encoding="utf-8", errors="replace") for path in files)


def user_options(words: Sequence[str], group: str) -> list[str]:
    """The options of a group in the user's folders, sorted."""
    return sorted(path.stem for root in user_folders.folders(words) for path in (root / group).glob("*.yaml"))


def user_recipes(words: Sequence[str]) -> dict[str, RecipeFile]:
    """The recipes of the user's folders by name. They are checked like any recipe that is not ours."""
    roots = user_folders.folders(words)
    files = [path for root in roots for name in ("recipe", "recipes") for path in sorted((root / name).glob("*.yaml"))]
    return {path.stem: RecipeFile(path.stem, path, "user") for path in files if recipe_files.NAME.match(path.stem)}


def user_keys(words: Sequence[str], group: str) -> dict[str, frozenset[str]]:
    """The keys of the whole configuration that each option of a group of the user's sets, by `group=option`."""
    import yaml

    keys_of_options: dict[str, frozenset[str]] = {}
    for path in (path for root in user_folders.folders(words) for path in sorted((root / group).glob("*.yaml"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "@package _global_" not in text:
            continue
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError:
            continue  # Hydra reads the file too, and reports where it is wrong
        keys = {key for key in _dotted(content, "") if key in known_keys()}
        entries = [entry for entry in (content or {}).get("defaults", []) if isinstance(entry, dict)]
        keys |= {str(name).split()[-1].lstrip("/").partition("@")[0] for entry in entries for name in entry}
        keys_of_options.setdefault(f"{group}={path.stem}", frozenset(keys))
    return keys_of_options


def _dotted(node: Any, prefix: str) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from _dotted(value, f"{prefix}{key}.")
