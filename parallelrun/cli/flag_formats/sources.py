"""Reads the settings of another runner's file. Its ending says which format it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.cli.flag_formats.settings import Setting
from parallelrun.cli.flag_formats.shell import commands

SCRIPT = "megatron"
_MAX_BYTES = 2**20
_FORMATS = {".toml": "torchtitan", ".json": "deepspeed", ".yaml": "accelerate", ".yml": "accelerate"}
_LAUNCHER = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
_SHELL_ARGUMENTS = re.compile(r"\$\{?\w*(ARG|OPT|FLAG|PARAM)\w*(\[[@*]\])?\}?|\$\{\w+\[[@*]\]\}", re.IGNORECASE)


def of_words(words: Sequence[str], where: str = "command line") -> list[Setting]:
    """The command line of pretrain_gpt.py, or its arguments alone: the launcher's before the program, its own after."""
    program = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
    settings: dict[str, Setting] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        for following in words[index + 1 :]:
            if following.startswith("--") or following.endswith(".py"):
                break
            if _SHELL_ARGUMENTS.fullmatch(following):
                settings[following] = Setting(following, True, where)
            else:
                values.append(following)
        if index > program or name in _LAUNCHER:
            settings[name] = Setting(name, values if len(values) > 1 else values[0] if values else True, where)
    return list(settings.values())


def of_file(path: Path) -> tuple[str, list[Setting]]:
    """The format of a file, and its settings. One that is not TOML, JSON or YAML by its ending is a shell script.

    Raises ConfigError, EnvironmentProblem.
    """
    where, ending = str(path), path.suffix.lower()
    try:
        source = path.read_text("utf-8-sig")
        if len(source) > _MAX_BYTES:
            raise ValueError(f"a configuration has at most {_MAX_BYTES} bytes")
        if ending not in _FORMATS:
            words = max(commands(source), key=lambda words: sum(word[:2] == "--" for word in words), default=[])
            return SCRIPT, of_words(words, where)
        content = _content(source, ending, where)
        names = _flat(content, "") if isinstance(content, dict) else ()
        return _FORMATS[ending], [Setting(name, value, where) for name, value in names]
    except OSError as error:
        raise ConfigError(Problem(f"cannot read {path}: {error.strerror}", where)) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        kind = ending[1:].upper() if ending in _FORMATS else "a shell script"
        raise ConfigError(Problem(f"not {kind}: {error}", where)) from error


def _content(source: str, ending: str, where: str) -> Any:
    """The values of a text. Raises ValueError or YAMLError."""
    if ending != ".toml":
        return json.loads(source) if ending == ".json" else yaml.safe_load(source)
    try:
        import tomllib
    except ImportError as error:
        raise EnvironmentProblem(Problem("reading TOML needs Python 3.11", where)) from error
    return tomllib.loads(source)


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
