"""The options of every group with their descriptions, read straight from the files. No Hydra, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from parallelrun.config import recipes
from parallelrun.config.keys import nearest
from parallelrun.errors import ConfigError, Problem


@dataclass(frozen=True)
class Option:
    """One option of a group. source: built-in | user."""

    name: str
    description: str
    source: str


def folder() -> Path:
    """Where the built-in groups lie."""
    return Path(str(resources.files("parallelrun.conf")))


def options(group: str) -> list[str]:
    """The names of a group's built-in options (recipe: the users' too), sorted."""
    if group == "recipe":
        return list(recipes.find())
    return sorted(path.stem for path in (folder() / group).glob("*.yaml"))


def values(group: str, name: str) -> dict[str, Any]:
    """What a built-in option says. Raises ConfigError for a name that no option has."""
    if name not in options(group):
        suggestion = " or ".join(f"{group}={option}" for option in nearest(name, options(group)))
        raise ConfigError(Problem(f"{group}={name}: no such {group}", group, suggestion, f"parallelrun ls {group}"))
    return yaml.safe_load((folder() / group / f"{name}.yaml").read_text(encoding="utf-8"))


def described(group: str) -> list[Option]:
    """The options of a group with source and one-line description."""
    if group == "recipe":
        return [Option(file.name, file.description, file.source) for file in recipes.find().values()]
    found = []
    for name in options(group):
        found.append(Option(name, values(group, name).get("description", ""), "built-in"))
    return found
