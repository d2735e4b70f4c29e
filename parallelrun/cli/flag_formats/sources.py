"""Recognises the format of a file by its content, and reads its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.cli.flag_formats import accelerate, deepspeed, megatron, torchtitan
from parallelrun.cli.flag_formats.settings import Setting, Translation
from parallelrun.cli.flag_formats.shell import ShellWord, commands

MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE = "Megatron-LM", "torchtitan", "DeepSpeed", "accelerate"
_MOST_BYTES = 2**20
_TABLE_OF_TITAN = re.compile(r"^\s*\[(parallelism|training|model|activation_checkpoint|lr_scheduler)\]", re.MULTILINE)
_FUNCTION_OF_TITAN = re.compile(r"^def \w+\(.*?return [\w.]*Config\(", re.MULTILINE | re.DOTALL)
_SHELL_ARGUMENTS = re.compile(r"\$\{?\w*(ARG|OPT|FLAG|PARAM)\w*(\[[@*]\])?\}?|\$\{\w+\[[@*]\]\}", re.IGNORECASE)
_ARGUMENT_OF_MEGATRON = re.compile(r"--(num-layers|hidden-size|tensor-model-parallel-size|micro-batch-size)\b")


@dataclass(frozen=True)
class OtherRun:
    """A run of another runner, by its settings. kind: that runner; shown: the file or command line they are from."""

    kind: str
    shown: str
    settings: Sequence[Setting]

    def translate(self) -> Translation:
        """The recipe for the settings."""
        return _TRANSLATIONS[self.kind](self.settings)


_TRANSLATIONS: dict[str, Callable[[Sequence[Setting]], Translation]] = {
    MEGATRON: megatron.translate,
    TORCHTITAN: torchtitan.translate,
    DEEPSPEED: deepspeed.translate,
    ACCELERATE: accelerate.translate,
}


def of_words(words: Sequence[str]) -> OtherRun:
    """The command line of pretrain_gpt.py, or its arguments alone. Raises ConfigError."""
    settings = _of_command([ShellWord(word, 0) for word in words], "command line")
    if not settings:
        what = "after -- there are no arguments of Megatron-LM such as --num-layers 24"
        raise ConfigError(Problem(what, "command line", command="parallelrun import-flags --help"))
    return OtherRun(MEGATRON, "command line", settings)


def of_file(path: Path, function: str | None = None) -> OtherRun:
    """The settings of a file. function: which of a Python file builds the configuration. Raises ConfigError."""
    shown = str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(Problem(f"cannot read {path}: {error.strerror}", shown)) from error
    try:
        source = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(Problem("not UTF-8 text", f"{shown}:{line}")) from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(Problem(f"a configuration has at most {_MOST_BYTES} bytes", shown))
    if source.lstrip().startswith("{"):
        return OtherRun(DEEPSPEED, shown, _checked(_of_json(source, shown), deepspeed.MARKS, shown))
    if _FUNCTION_OF_TITAN.search(source):
        return OtherRun(TORCHTITAN, shown, torchtitan.of_python(source, shown, function))
    if _TABLE_OF_TITAN.search(source):
        return OtherRun(TORCHTITAN, shown, _of_toml(source, shown))
    if _ARGUMENT_OF_MEGATRON.search(source) and (settings := _of_script(source, shown)) is not None:
        return OtherRun(MEGATRON, shown, settings)
    return OtherRun(ACCELERATE, shown, _checked(_of_yaml(source, shown), accelerate.MARKS, shown))


def _checked(settings: Sequence[Setting], marks: Sequence[str], shown: str) -> Sequence[Setting]:
    if any(setting.name.partition(".")[0] in marks for setting in settings):
        return settings
    what = (
        "not recognised as arguments of Megatron-LM, a job of torchtitan, or a configuration of DeepSpeed or accelerate"
    )
    raise ConfigError(Problem(what, shown, command="parallelrun import-flags --help"))


def _of_json(source: str, shown: str) -> list[Setting]:
    try:
        json.loads(source)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(Problem(f"not JSON: {error}", f"{shown}{line}")) from error
    return _of_yaml(source.replace("\t", " "), shown)  # JSON is YAML, which has lines


def _of_yaml(source: str, shown: str) -> list[Setting]:
    import yaml

    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            return []
        values = yaml.SafeLoader("")
        return [
            Setting(name, values.construct_object(node, deep=True), f"{shown}:{line}")
            for name, node, line in _leaves(root, "", 0)
        ]
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        raise ConfigError(Problem(f"not YAML: {getattr(error, 'problem', None) or error}", where)) from error


def _leaves(root: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any, int]]:
    """(dotted key, node, line) of every value that is no mapping with entries."""
    import yaml

    for key, node in root.value:
        name = f"{prefix}{key.value}"
        if isinstance(node, yaml.MappingNode) and node.value and depth < 8:
            yield from _leaves(node, f"{name}.", depth + 1)
        elif not isinstance(node, yaml.MappingNode):
            yield name, node, key.start_mark.line + 1


def _of_script(script: str, file: str) -> list[Setting] | None:
    """The settings of the command in a script that has most of them; None if it has no command with flags."""
    found = max(commands(script), key=lambda words: sum(word.text.startswith("--") for word in words), default=[])
    return _of_command(found, file) if any(word.text.startswith("--") for word in found) else None


def _of_command(words: Sequence[ShellWord], file: str) -> list[Setting]:
    """The settings of a command line: the launcher's before the program, the program's after it."""
    program = next((index for index, word in enumerate(words) if word.text.endswith(".py")), -1)
    settings: dict[str, Setting] = {}
    for index, word in enumerate(words):
        if not word.text.startswith("--"):
            continue
        name, equals, value = word.text.partition("=")
        values = [value] if equals else []
        for following in words[index + 1 :]:
            if following.text.startswith("--") or following.text.endswith(".py"):
                break
            if _SHELL_ARGUMENTS.fullmatch(following.text):
                settings[following.text] = Setting(following.text, True, f"{file}:{following.line}")
            else:
                values.append(following.text)
        if index > program or name in megatron.LAUNCHER:
            where = f"{file}:{word.line}" if word.line else file
            settings[name] = Setting(name, values if len(values) > 1 else values[0] if values else True, where)
    return list(settings.values())


def _of_toml(source: str, file: str) -> list[Setting]:
    """The settings of a TOML file, as `section.key`. Raises ConfigError with its line if it is not TOML."""
    try:
        import tomllib
    except ImportError as error:
        what = "reading TOML needs Python 3.11"
        raise EnvironmentProblem(Problem(what, file)) from error
    try:
        content = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ConfigError(Problem(f"not TOML: {error}", f"{file}:{line[1]}" if line else file)) from error
    lines = _lines_of_toml(source)
    return [
        Setting(torchtitan.SPELLINGS.get(name, name), value, f"{file}:{lines[name]}" if name in lines else file)
        for name, value in _flat(content, "")
    ]


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines_of_toml(source: str) -> dict[str, int]:
    section, found = "", {}
    for line, content in enumerate(source.splitlines(), 1):
        if head := re.match(r"\s*\[+([^\]]+)\]", content):
            section = f"{head[1].strip()}."
        elif key := re.match(r"\s*([\w.\-]+)\s*=", content):
            found[f"{section}{key[1]}"] = line
    return found
