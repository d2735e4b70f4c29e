"""`--config-dir D`: what a user's own folder of configuration adds to ours. No Hydra, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallelrun.config.keys import GROUPS
from parallelrun.config.recipes import NAME, RecipeFile

_FLAGS = ("--config-dir", "-cd")
_RECIPES = ("recipe", "recipes")  # the group, or the folder's name elsewhere


def folder(flags: Sequence[str]) -> Path | None:
    """The folder that Hydra's flags name, None where they name none."""
    for number, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in _FLAGS:
            text = value if equals else flags[number + 1] if number + 1 < len(flags) else ""
            return Path(text).expanduser() if text else None
    return None


def groups(flags: Sequence[str]) -> frozenset[str]:
    """The groups that only the folder has: its subfolders, `experiment` and `experiment/vision` alike."""
    root = folder(flags)
    if root is None or not root.is_dir():
        return frozenset()
    found = {path.parent.relative_to(root).as_posix() for path in root.rglob("*.yaml")}
    return frozenset(name for name in found if name != "." and name.split("/")[0] not in (*GROUPS, "recipes", "hydra"))


def recipes(flags: Sequence[str]) -> dict[str, RecipeFile]:
    """The folder's recipes by name. They are read as files of other people are: checked, whatever Hydra would take."""
    root = folder(flags)
    files = [path for name in _RECIPES if root is not None for path in sorted((root / name).glob("*.yaml"))]
    return {path.stem: RecipeFile(path.stem, path, "user") for path in files if NAME.match(path.stem)}


def keys(flags: Sequence[str], group: str) -> dict[str, frozenset[str]]:
    """The keys that each option of a group of the folder sets in the whole configuration, under `group=option`."""
    import yaml  # here: most command lines name no folder

    from parallelrun.config.keys import known_keys

    root = folder(flags)
    found = {}
    for path in sorted((root / group).glob("*.yaml")) if root is not None else []:
        text = path.read_text(encoding="utf-8", errors="replace")
        if "@package _global_" not in text:
            continue
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError:
            continue  # Hydra reads it too, and says where it is wrong
        set_here = {key for key in _leaves(values, "") if key in known_keys()}
        set_here |= {name for entry in (values or {}).get("defaults", []) for name in _chosen(entry)}
        found[f"{group}={path.stem}"] = frozenset(set_here)
    return found


def _leaves(values: Any, prefix: str) -> Iterator[str]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _leaves(value, f"{prefix}{key}.")


def _chosen(entry: Any) -> Iterator[str]:
    """The groups that one entry of `defaults` chooses."""
    if isinstance(entry, dict):
        for name in entry:
            yield str(name).split()[-1].lstrip("/").partition("@")[0]
