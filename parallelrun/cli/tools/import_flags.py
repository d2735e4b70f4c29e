"""`parallelrun import-flags`: the settings of another runner as a recipe."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallelrun.base.errors import EXIT_OK, ConfigError, EnvironmentProblem, Problem
from parallelrun.cli.flag_formats import recipe, sources
from parallelrun.cli.flag_formats.table import Translation

if TYPE_CHECKING:
    from parallelrun.planner.contract.plan import Plan

_MODEL_AXES = ("pp", "tp", "cp", "ep")
_DESCRIPTION = """Translate the settings of another runner into a recipe: a file with arguments of Megatron-LM (a shell
script), a job of torchtitan (TOML or Python), a configuration of DeepSpeed (JSON) or accelerate (YAML); or, after --,
a command line of Megatron-LM. The format is recognised by its content. What has no counterpart is listed."""


def main(words: list[str]) -> int:
    """Print the recipe, or write it. Raises ConfigError with every fault of the file and of the plan it describes."""
    options, command_line = _parsed(words)
    source = sources.of_words(command_line) if command_line else sources.of_file(Path(options.file), options.config)
    result = source.translate(_overrides(options.overrides))
    plan = recipe.check(result, lambda: _plan(result))
    text = recipe.text(result, source.runner, source.shown, plan)
    if options.to is None:
        sys.stdout.write(text)
        return EXIT_OK
    _write(Path(options.to).expanduser(), text)
    for title, lines in recipe.lists(result):
        print(f"{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")
    print(f"written: {options.to}; try:\nparallelrun plan recipe={options.to}")
    return EXIT_OK


def _parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the options, the words after --)."""
    own, command_line = words, []
    if "--" in words:
        own, command_line = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser("parallelrun import-flags", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("file", nargs="?", help="the file; or the arguments after --")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of the recipe that the file lacks: model="
    )
    parser.add_argument("--to", metavar="FILE", help="write the recipe here, and print the lists (default: print it)")
    parser.add_argument("--config", metavar="FUNCTION", help="of a Python file of torchtitan: the one to translate")
    options = parser.parse_args(own)
    if options.file is not None and "=" in options.file:
        options.file, options.overrides = None, [options.file, *options.overrides]
    if (options.file is None) == (not command_line):
        cause = "give either a file, or after -- the arguments of pretrain_gpt.py"
        raise ConfigError(Problem(cause, "command line", command="parallelrun import-flags --help"))
    return options, command_line


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(Problem(f"{word}: not key=value", "command line"))
        values[key] = yaml.safe_load(value)
    return values


def _plan(result: Translation) -> Plan:
    """Compose and resolve the recipe; data that is not on this machine is not looked for. Where the number of ranks is
    open, the plan has the fewest, so that no demonstration decides whether the recipe is legal."""
    from parallelrun.config import compose, overrides
    from parallelrun.planner.resolve.resolve_config import resolve

    path = result.values.get("dataset.path")
    if path is not None and not Path(f"{path}.idx").is_file() and not Path(path).exists():
        result = copy(result)
        result.values = {key: value for key, value in result.values.items() if not key.startswith("dataset.")}
        result.groups = {**result.groups, "dataset": "synthetic"}
    with tempfile.TemporaryDirectory(prefix="parallelrun-recipe-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(recipe.text(result, "", ""), encoding="utf-8")
        read, _ = overrides.read([f"recipe={file}"], False, "recipe")
        composed, _ = compose.compose_once(compose.prepare(read, (), "plan", False))
        fewest = math.prod(result.values.get(axis, 1) for axis in _MODEL_AXES)
        return resolve(composed.config, given=composed.given, world=fewest if recipe.world_is_open(result) else None)


def _write(path: Path, text: str) -> None:
    from parallelrun.base.records import write_text

    if path.exists():
        raise ConfigError(Problem(f"{path} exists", "--to", "another name"))
    try:
        write_text(path, text)
    except OSError as error:
        raise EnvironmentProblem(Problem(f"cannot write {path}: {error.strerror}", "--to")) from error
