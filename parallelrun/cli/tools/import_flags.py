"""`parallelrun import-flags`: the settings of another runner as a recipe."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import textwrap
from copy import copy
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.flag_formats import sources
from parallelrun.cli.flag_formats.table import WORLD, Translation

_WIDTH = 118
_DESCRIPTION = """Translate the settings of another runner into a recipe, which is printed: a shell script with
arguments of Megatron-LM, a job of torchtitan (.toml), a configuration of DeepSpeed (.json) or accelerate (.yaml); or,
after --, a command line of Megatron-LM. Comments of the recipe list what has no counterpart."""


def main(words: list[str]) -> int:
    """Print the recipe. Raises ConfigError with every fault of the file and of the plan it describes."""
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser("parallelrun import-flags", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("file", nargs="*", help="the file, and key=value for what it lacks; or the words after --")
    own, command_line = parser.parse_args(words[:end]).file, words[end + 1 :]
    files = [word for word in own if "=" not in word]
    if len(files) + bool(command_line) != 1:
        cause = "give either a file, or after -- the arguments of pretrain_gpt.py"
        raise ConfigError(Problem(cause, "command line", command="parallelrun import-flags --help"))
    overrides = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in own if "=" in word)}
    name, settings = sources.of_file(Path(files[0])) if files else (sources.SCRIPT, sources.of_words(command_line))
    result = Translation(name, settings, overrides)
    if not result.knows_any:
        cause = f"there is no setting of {result.runner} (the ending of a file says whose it is)"
        raise ConfigError(Problem(cause, files[0] if files else "command line"))
    if result.problems:
        raise ConfigError(*result.problems)
    try:
        world = _check(result)
    except ConfigError as error:
        raise ConfigError(*(_at_setting(problem, result) for problem in error.problems)) from error
    sys.stdout.write(recipe(result, files[0] if files else "command line", world))
    return EXIT_OK


def recipe(result: Translation, shown: str, world: int | None = None) -> str:
    """The recipe's YAML. Its comments say what has no counterpart. shown: the file. world: of the plan, if known."""
    lines = ["# @package _global_"]
    for title, entries in result.lists():
        for entry in [f"{title}:", *(f"  {line}" for line in entries)] if entries else []:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="# ", subsequent_indent="#     ")
    model, devices = result.groups.get("model", "the default model"), {} if world is None else {"devices": world}
    about = {"purpose": f"{model}, as {result.runner} runs it.", **devices}
    about["source"] = f"{result.runner}'s {shown}, by parallelrun import-flags"
    options = [{f"override /{group}": option} for group, option in result.groups.items()]
    document: dict[str, Any] = {"about": about, "defaults": options}
    for key, value in result.values.items():
        *sections, last = key.split(".")
        section = reduce(lambda inside, name: inside.setdefault(name, {}), sections, document)
        section[last] = value
    return "\n".join([*lines, yaml.safe_dump(document, sort_keys=False, width=_WIDTH)])


def _check(result: Translation) -> int | None:
    """Compose and resolve the recipe with random data: its own may be elsewhere. Return the number of ranks.

    None if it is open: then the plan has the fewest, so that no demonstration decides whether the recipe is legal.
    """
    from parallelrun.config import compose, overrides
    from parallelrun.planner.resolve.resolve_config import resolve

    is_open, result = not result.origin.keys() & set(WORLD), copy(result)
    result.values = {key: value for key, value in result.values.items() if not key.startswith("dataset.")}
    result.groups = {**result.groups, "dataset": "synthetic"}
    with tempfile.TemporaryDirectory(prefix="parallelrun-recipe-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe(result, ""), encoding="utf-8")
        read, _ = overrides.read([f"recipe={file}"], False, "recipe")
        composed, _ = compose.compose_once(compose.prepare(read, (), "plan", False))
        fewest = math.prod(result.values.get(axis, 1) for axis in ("pp", "tp", "cp", "ep"))
        plan = resolve(composed.config, given=composed.given, world=fewest if is_open else None)
    return None if is_open else plan.world


def _at_setting(problem: Problem, result: Translation) -> Problem:
    """The problem with the setting that it comes from, in the place of a key of the recipe."""
    key = problem.where.partition("=")[0]
    names = [key, f"model.{key}", f"strategy.{key}", *(name for name in result.origin if f"{name}=" in problem.what)]
    setting = next((result.origin[name] for name in names if name in result.origin), None)
    return replace(problem, where=f"{setting.where or 'default'}: {setting.text}") if setting else problem
