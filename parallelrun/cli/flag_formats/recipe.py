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


def with_overrides(result: Translation, overrides: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Set the keys and groups that the user gives beside the file, which win."""
    for key, value in overrides.items():
        (result.groups if key in groups else result.values)[key] = value
        result.origin[key] = Setting(key, value, "command line")
        result.given.add(key)
    for pair in _EXCLUSIVE:
        for key in pair if overrides.keys() & set(pair) else ():
            if key not in overrides:
                result.values.pop(key, None)


def lists(result: Translation) -> list[tuple[str, list[str]]]:
    """(title, lines) of what was translated, of the other runner's defaults, of what has no counterpart, and of what
    stays open."""
    stated = [(setting, pair) for setting, pair in result.translated if pair.partition("=")[0] in _held(result)]
    given = [f"{setting.text}: {pair}{_place(setting)}" for setting, pair in stated if setting.where]
    left = [f"{setting.text}: {pair}" for setting, pair in stated if not setting.where]
    dropped = [f"{setting.text}: {why}{_place(setting)}" for setting, why in result.dropped]
    return [
        ("translated", given),
        ("left at its default, which is written here", left),
        ("no counterpart", dropped),
        ("left open, so that parallelrun's own default applies until you give it", _left_open(result)),
    ]


def _left_open(result: Translation) -> list[str]:
    """A line for each setting that decides nothing, and for each part of a run's description that the file lacks."""
    lines, named = [], result.origin.keys() | (result.groups.keys() - {"dataset"})  # whose option only stands in
    for key, setting, why in result.left_open:
        named.add(key)
        if key not in result.given:
            advice = f": give {key}=" if key else ", and parallelrun has nothing for it"
            lines.append(f"{setting.text}: {why}{advice}{_place(setting)}")
    for keys in _DESCRIPTION:
        if not named & set(keys):
            lines.append(f"{keys[0]}: the file does not say: give {'= or '.join(keys)}=")
    return lines


def world_is_open(result: Translation) -> bool:
    """Return whether neither the file nor the user says how many ranks there are."""
    return not result.origin.keys() & set(_WORLD)


def _held(result: Translation) -> set[str]:
    """The keys whose values come from the file."""
    return {*result.values, *result.groups} - result.given


def _place(setting: Setting) -> str:
    return f" ({setting.where.rpartition('/')[2]})" if ":" in setting.where else ""


def text(result: Translation, kind: str, shown: str, plan: Plan | None = None) -> str:
    """The recipe's YAML. Its comments say what has no counterpart. plan: of the recipe, for `about:`."""
    lines = [f"# From {kind}'s {shown}, by parallelrun import-flags", "# @package _global_"]
    for title, entries in lists(result)[1:]:
        for entry in [f"{title}:", *(f"  {line}" for line in entries)] if entries else []:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="# ", subsequent_indent="#     ")
    about: dict[str, Any] = {"source": f"{kind}'s {shown}, by parallelrun import-flags"}
    if plan is not None:
        devices = {} if world_is_open(result) else {"devices": plan.world}
        about = {"purpose": _purpose(result, plan, kind), **devices, **about}
    lines.append(_yaml({"about": about}) + "defaults:")
    lines += [f"  - override /{group}: {option}" for group, option in result.groups.items()]
    nested: dict[str, Any] = {}
    for key, value in result.values.items():
        inside = nested
        for part in key.split(".")[:-1]:
            inside = inside.setdefault(part, {})
        inside[key.rpartition(".")[2]] = value
    return "\n".join(lines) + "\n\n" + (_yaml(nested) if nested else "")


def _purpose(result: Translation, plan: Plan, kind: str) -> str:
    degrees = "".join(
        f" {axis}={size}"
        for axis, size in plan.degrees.items()
        if size > 1 and not (axis == "dp" and world_is_open(result))
    )
    return f"{result.groups.get('model', 'the default model')} by {plan.preset}{degrees}, as {kind} runs it."


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.dump(values, Dumper=yaml.SafeDumper, sort_keys=False, width=_WIDTH))


def check(result: Translation, plan: Callable[[], Planned]) -> Planned:
    """The plan of the recipe. Raises ConfigError with every fault of the settings and of that plan, each with its
    setting.

    plan: composes and resolves the recipe.
    """
    problems = [*result.problems, *(problem for group, problem in result.needed.items() if group not in result.groups)]
    try:
        if not problems:
            return plan()
    except ConfigError as error:
        problems = [_blamed(problem, result) for problem in error.problems]
    raise ConfigError(*problems)


def _blamed(problem: Problem, result: Translation) -> Problem:
    """The problem with the setting that it comes from, in the place of a key of the recipe."""
    key = problem.where.partition("=")[0]
    names = [name for name in (key, f"model.{key}", f"strategy.{key}") if name in result.origin]
    names += [name for name in result.origin if problem.what.startswith(f"{name}=") or f"{name}=" in problem.what]
    if not names:
        return problem
    setting = result.origin[names[0]]
    return replace(problem, where=f"{setting.where or 'default'}: {setting.text}")
