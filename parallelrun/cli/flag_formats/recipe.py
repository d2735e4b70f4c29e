"""The recipe of a translation as YAML, with what became of each setting, and its check by composing and planning it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.flag_formats.table import WORLD, Translation

if TYPE_CHECKING:
    from parallelrun.planner.contract.plan import Plan

Planned = TypeVar("Planned")
_WIDTH = 118
# What every run is described by: of each of these, one key is from the file, or listed as left open.
_DESCRIPTION = (WORLD, ("model",), ("dataset",), ("precision",), ("steps",), ("global_batch", "local_batch"),
                ("optimizer.lr",), ("optimizer.schedule",))  # fmt: skip


def lists(result: Translation) -> list[tuple[str, list[str]]]:
    """(title, lines) of what was translated, of the other runner's defaults, of what has no counterpart, and of what
    stays open."""
    values = {**result.values, **result.groups}
    pairs = [(setting, f"{setting.text}: {key}={values[key]}{setting.place}")
             for key, setting in result.origin.items() if key not in result.user_keys]  # fmt: skip
    return [
        ("translated", [text for setting, text in pairs if setting.where]),
        ("left at its default, which is written here", [text for setting, text in pairs if not setting.where]),
        ("no counterpart", [f"{setting.text}: {why}{setting.place}" for setting, why in result.dropped]),
        ("left open, so that parallelrun's own default applies until you give it", _left_open(result)),
    ]


def _left_open(result: Translation) -> list[str]:
    """A line for each setting that decides nothing, and for each part of a run's description that the file lacks."""
    lines, keys = [], result.origin.keys() | (result.groups.keys() - {"dataset"})  # whose option only stands in
    for key, setting, why in result.left_open:
        advice = f": give {key}=" if key else ", and parallelrun has nothing for it"
        lines.append(f"{setting.text}: {why}{advice}{setting.place}")
    keys |= {key for key, _, _ in result.left_open}
    return lines + [f"{part[0]}: the file does not say: give {'= or '.join(part)}="
                    for part in _DESCRIPTION if not keys & set(part)]  # fmt: skip


def world_is_open(result: Translation) -> bool:
    """Return whether neither the file nor the user says how many ranks there are."""
    return not result.origin.keys() & set(WORLD)


def text(result: Translation, kind: str, shown: str, plan: Plan | None = None) -> str:
    """The recipe's YAML. Its comments say what has no counterpart. plan: of the recipe, for `about:`."""
    lines = [f"# From {kind}'s {shown}, by parallelrun import-flags", "# @package _global_"]
    for title, entries in lists(result)[1:]:
        for entry in [f"{title}:", *(f"  {line}" for line in entries)] if entries else []:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="# ", subsequent_indent="#     ")
    about: dict[str, Any] = {"source": f"{kind}'s {shown}, by parallelrun import-flags"}
    if plan is not None:
        is_open = world_is_open(result)
        degrees = [
            f" {axis}={size}" for axis, size in plan.degrees.items() if size > 1 and not (axis == "dp" and is_open)
        ]
        model = result.groups.get("model", "the default model")
        purpose = f"{model} by {plan.preset}{''.join(degrees)}, as {kind} runs it."
        about = {"purpose": purpose, **({} if is_open else {"devices": plan.world}), **about}
    lines.append(_yaml({"about": about}) + "defaults:")
    lines += [f"  - override /{group}: {option}" for group, option in result.groups.items()]
    nested: dict[str, Any] = {}
    for key, value in result.values.items():
        inside = nested
        for part in key.split(".")[:-1]:
            inside = inside.setdefault(part, {})
        inside[key.rpartition(".")[2]] = value
    return "\n".join(lines) + "\n\n" + (_yaml(nested) if nested else "")


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.dump(values, Dumper=yaml.SafeDumper, sort_keys=False, width=_WIDTH))


def check(result: Translation, plan: Callable[[], Planned]) -> Planned:
    """The plan of the recipe. Raises ConfigError with every fault of the settings and of that plan, each with its
    setting.

    plan: composes and resolves the recipe.
    """
    if result.problems:
        raise ConfigError(*result.problems)
    try:
        return plan()
    except ConfigError as error:
        raise ConfigError(*(_at_setting(problem, result) for problem in error.problems)) from error


def _at_setting(problem: Problem, result: Translation) -> Problem:
    """The problem with the setting that it comes from, in the place of a key of the recipe."""
    key = problem.where.partition("=")[0]
    names = [name for name in (key, f"model.{key}", f"strategy.{key}") if name in result.origin]
    names += [name for name in result.origin if f"{name}=" in problem.what]
    if not names:
        return problem
    setting = result.origin[names[0]]
    return replace(problem, where=f"{setting.where or 'default'}: {setting.text}")
