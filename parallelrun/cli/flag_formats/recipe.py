"""The recipe of a translation as YAML, with what became of each setting, and its check by composing and planning it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.flag_formats.settings import Setting, Translation

if TYPE_CHECKING:
    from parallelrun.planner.contract.plan import Plan

Planned = TypeVar("Planned")
_WIDTH = 118
_EXCLUSIVE = (("dp", "world"), ("global_batch", "local_batch"), ("micro_batch", "microbatches"))
_WORLD = ("world", "dp")
# What every run is described by: of each of these, one key is from the file, or listed as left open.
_DESCRIPTION = (_WORLD, ("model",), ("dataset",), ("precision",), ("steps",), ("global_batch", "local_batch"),
                ("optimizer.lr",), ("optimizer.schedule",))  # fmt: skip


def with_overrides(found: Translation, overrides: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Set the keys and groups that the user gives beside the file, which win."""
    for key, value in overrides.items():
        (found.groups if key in groups else found.values)[key] = value
        found.origin[key] = Setting(key, value, "command line")
        found.given.add(key)
    for pair in _EXCLUSIVE:
        for key in pair if overrides.keys() & set(pair) else ():
            if key not in overrides:
                found.values.pop(key, None)


def lists(found: Translation) -> list[tuple[str, list[str]]]:
    """(title, lines) of what was translated, of the other runner's defaults, of what has no counterpart, and of what
    stays open."""
    kept = [(setting, pair) for setting, pair in found.translated if pair.partition("=")[0] in _held(found)]
    given = [f"{setting.text}: {pair}{_place(setting)}" for setting, pair in kept if setting.where]
    left = [f"{setting.text}: {pair}" for setting, pair in kept if not setting.where]
    dropped = [f"{setting.text}: {why}{_place(setting)}" for setting, why in found.dropped]
    return [
        ("translated", given),
        ("left at its default, which is written here", left),
        ("no counterpart", dropped),
        ("left open, so that parallelrun's own default applies until you give it", _left_open(found)),
    ]


def _left_open(found: Translation) -> list[str]:
    """A line for each setting that decides nothing, and for each part of a run's description that the file lacks."""
    lines, named = [], found.origin.keys() | (found.groups.keys() - {"dataset"})  # whose option only stands in
    for key, setting, why in found.left_open:
        named.add(key)
        if key not in found.given:
            advice = f": give {key}=" if key else ", and parallelrun has nothing for it"
            lines.append(f"{setting.text}: {why}{advice}{_place(setting)}")
    for keys in _DESCRIPTION:
        if not named & set(keys):
            lines.append(f"{keys[0]}: the file does not say: give {'= or '.join(keys)}=")
    return lines


def world_is_open(found: Translation) -> bool:
    """Return whether neither the file nor the user says how many ranks there are."""
    return not found.origin.keys() & set(_WORLD)


def _held(found: Translation) -> set[str]:
    """The keys whose values come from the file."""
    return {*found.values, *found.groups} - found.given


def _place(setting: Setting) -> str:
    return f" ({setting.where.rpartition('/')[2]})" if ":" in setting.where else ""


def text(found: Translation, kind: str, shown: str, plan: Plan | None = None) -> str:
    """The recipe's YAML. Its comments say what has no counterpart. plan: of the recipe, for `about:`."""
    lines = [f"# From {kind}'s {shown}, by parallelrun import-flags", "# @package _global_"]
    for title, entries in lists(found)[1:]:
        for entry in [f"{title}:", *(f"  {one}" for one in entries)] if entries else []:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="# ", subsequent_indent="#     ")
    about: dict[str, Any] = {"source": f"{kind}'s {shown}, by parallelrun import-flags"}
    if plan is not None:
        devices = {} if world_is_open(found) else {"devices": plan.world}
        about = {"purpose": _purpose(found, plan, kind), **devices, **about}
    lines.append(_yaml({"about": about}) + "defaults:")
    lines += [f"  - override /{group}: {option}" for group, option in found.groups.items()]
    nested: dict[str, Any] = {}
    for key, value in found.values.items():
        inside = nested
        for part in key.split(".")[:-1]:
            inside = inside.setdefault(part, {})
        inside[key.rpartition(".")[2]] = value
    return "\n".join(lines) + "\n\n" + (_yaml(nested) if nested else "")


def _purpose(found: Translation, plan: Plan, kind: str) -> str:
    degrees = "".join(
        f" {axis}={size}"
        for axis, size in plan.degrees.items()
        if size > 1 and not (axis == "dp" and world_is_open(found))
    )
    return f"{found.groups.get('model', 'the default model')} by {plan.preset}{degrees}, as {kind} runs it."


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.dump(values, Dumper=yaml.SafeDumper, sort_keys=False, width=_WIDTH))


def check(found: Translation, plan: Callable[[], Planned]) -> Planned:
    """The plan of the recipe. Raises ConfigError with every fault of the settings and of that plan, each with its
    setting.

    plan: composes and resolves the recipe.
    """
    problems = [*found.problems, *(problem for group, problem in found.needed.items() if group not in found.groups)]
    try:
        if not problems:
            return plan()
    except ConfigError as error:
        problems = [_blamed(problem, found) for problem in error.problems]
    raise ConfigError(*problems)


def _blamed(problem: Problem, found: Translation) -> Problem:
    """The problem with the setting that it comes from, in the place of a key of the recipe."""
    key = problem.where.partition("=")[0]
    names = [name for name in (key, f"model.{key}", f"strategy.{key}") if name in found.origin]
    names += [name for name in found.origin if problem.what.startswith(f"{name}=") or f"{name}=" in problem.what]
    if not names:
        return problem
    setting = found.origin[names[0]]
    return replace(problem, where=f"{setting.where or 'default'}: {setting.text}")
