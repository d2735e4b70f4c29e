"""Reads the settings of another runner's file. Its ending says which format it has."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli.flag_formats.settings import Setting
from parallelrun.cli.flag_formats.shell import commands
from parallelrun.report.records.read import flatten

SCRIPT = "megatron"
_FORMATS = {".toml": "torchtitan", ".json": "deepspeed", ".yaml": "accelerate", ".yml": "accelerate"}
_SHELL_ARGUMENTS = re.compile(r"\$\{?\w*(ARG|OPT|FLAG|PARAM)\w*(\[[@*]\])?\}?|\$\{\w+\[[@*]\]\}", re.IGNORECASE)


def of_words(words: Sequence[str], where: str = "command line") -> list[Setting]:
    """The command line of pretrain_gpt.py, with the launcher's arguments before the program, or its arguments alone."""
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
        settings[name] = Setting(name, values if len(values) > 1 else values[0] if values else True, where)
    return list(settings.values())


def of_file(path: Path) -> tuple[str, list[Setting]]:
    """The format of a file, and its settings. One that is not TOML, JSON or YAML by its ending is a shell script.

    Raises ConfigError.
    """
    where, ending = str(path), path.suffix.lower()
    try:
        source = path.read_text("utf-8-sig")
        if ending not in _FORMATS:
            words = max(commands(source), key=lambda words: sum(word[:2] == "--" for word in words), default=[])
            return SCRIPT, of_words(words, where)
        content = _content(source, ending)
        values = flatten(content) if isinstance(content, dict) else {}
        return _FORMATS[ending], [Setting(name, value, where) for name, value in values.items() if value != {}]
    except OSError as error:
        raise ConfigError(Problem(f"cannot read {path}: {error.strerror}", where)) from error
    except (ValueError, yaml.YAMLError, RecursionError, ImportError) as error:  # Python 3.10 has no tomllib
        kind = ending[1:].upper() if ending in _FORMATS else "a shell script"
        raise ConfigError(Problem(f"cannot be read as {kind}: {error}", where)) from error


def _content(source: str, ending: str) -> Any:
    """The values of a text. Raises ValueError, YAMLError or ImportError."""
    if ending == ".toml":
        import tomllib

        return tomllib.loads(source)
    return json.loads(source) if ending == ".json" else yaml.safe_load(source)
