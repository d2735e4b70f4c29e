"""Recognises the format of a file by its content, and reads its settings with their lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.cli.flag_formats.settings import Setting
from parallelrun.cli.flag_formats.shell import commands, without_comments
from parallelrun.cli.flag_formats.table import Translation, table_of

_MAX_BYTES = 2**20
_HELP = "parallelrun import-flags --help"
_LAUNCHER = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
_TABLE_OF_TITAN = re.compile(r"^\s*\[(parallelism|training|model|activation_checkpoint|lr_scheduler)\]", re.MULTILINE)
_FUNCTION_OF_TITAN = re.compile(r"^def \w+\(.*?return [\w.]*Config\(", re.MULTILINE | re.DOTALL)
_MODEL_OF_TITAN = re.compile(r"(llama3|llama4|qwen3)(?=_|$)|deepseek")
_SHELL_ARGUMENTS = re.compile(r"\$\{?\w*(ARG|OPT|FLAG|PARAM)\w*(\[[@*]\])?\}?|\$\{\w+\[[@*]\]\}", re.IGNORECASE)
_ARGUMENT_OF_MEGATRON = re.compile(r"--(num-layers|hidden-size|tensor-model-parallel-size|micro-batch-size)\b")


@dataclass(frozen=True)
class OtherRun:
    """A run of another runner. format: the name of its table; shown: the file or command line of its settings."""

    format: str
    shown: str
    settings: Sequence[Setting]

    @property
    def runner(self) -> str:
        return str(table_of(self.format)["runner"])

    def translate(self, overrides: Mapping[str, Any] | None = None) -> Translation:
        """The recipe for the settings. overrides: keys that the user gives in addition to the file, which win."""
        return Translation(self.format, self.settings, overrides)


def of_words(words: Sequence[str]) -> OtherRun:
    """The command line of pretrain_gpt.py, or its arguments alone. Raises ConfigError."""
    settings = _of_command(words, "command line")
    if not settings:
        cause = "after -- there are no arguments of Megatron-LM such as --num-layers 24"
        raise ConfigError(Problem(cause, "command line", command=_HELP))
    return OtherRun("megatron", "command line", settings)


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
    if len(raw) > _MAX_BYTES:
        raise ConfigError(Problem(f"a configuration has at most {_MAX_BYTES} bytes", shown))
    if _FUNCTION_OF_TITAN.search(source):
        return OtherRun("torchtitan", shown, _of_python(source, shown, function))
    if _TABLE_OF_TITAN.search(source) and not source.lstrip().startswith("{"):
        return OtherRun("torchtitan", shown, _of_toml(source, shown))
    if _ARGUMENT_OF_MEGATRON.search(source):
        words = max(commands(source), key=lambda words: sum(word.startswith("--") for word in words), default=[])
        if settings := _of_command(words, shown, without_comments(source)):
            return OtherRun("megatron", shown, settings)
    name = "deepspeed" if source.lstrip().startswith("{") else "accelerate"
    settings = _of_yaml(source.replace("\t", " ") if name == "deepspeed" else source, shown)
    if not any(setting.name.partition(".")[0] in table_of(name)["marks"] for setting in settings):
        formats = "arguments of Megatron-LM, a job of torchtitan, or a configuration of DeepSpeed or accelerate"
        raise ConfigError(Problem(f"not recognised as {formats}", shown, command=_HELP))
    return OtherRun(name, shown, settings)


def _of_yaml(source: str, shown: str) -> list[Setting]:
    """The settings of a YAML file, or of a JSON file, which is YAML too."""
    import yaml

    def leaves(root: yaml.MappingNode, prefix: str, depth: int) -> Iterator[Setting]:
        for key, node in root.value:
            name = f"{prefix}{key.value}"
            if isinstance(node, yaml.MappingNode) and node.value and depth < 8:
                yield from leaves(node, f"{name}.", depth + 1)
            elif not isinstance(node, yaml.MappingNode):
                value = yaml.SafeLoader("").construct_object(node, deep=True)
                yield Setting(name, value, f"{shown}:{key.start_mark.line + 1}")

    try:
        root = yaml.compose(source, Loader=yaml.SafeLoader)
        return list(leaves(root, "", 0)) if isinstance(root, yaml.MappingNode) else []
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown}:{mark.line + 1}" if mark else shown
        raise ConfigError(Problem(f"not YAML or JSON: {getattr(error, 'problem', None) or error}", where)) from error


def _of_command(words: Sequence[str], file: str, script: str = "") -> list[Setting]:
    """The settings of a command line: the launcher's before the program, the program's after it.

    script: the text in which the line of each setting is looked up.
    """

    def where(name: str) -> str:
        match = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", script)
        return f"{file}:{script.count(chr(10), 0, match.start()) + 1}" if match else file

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
                settings[following] = Setting(following, True, where(following))
            else:
                values.append(following)
        if index > program or name in _LAUNCHER:
            settings[name] = Setting(name, values if len(values) > 1 else values[0] if values else True, where(name))
    return list(settings.values())


def _of_toml(source: str, file: str) -> list[Setting]:
    """The settings of a TOML file, as `section.key`. Raises ConfigError with its line if it is not TOML."""
    try:
        import tomllib
    except ImportError as error:
        raise EnvironmentProblem(Problem("reading TOML needs Python 3.11", file)) from error
    try:
        content = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ConfigError(Problem(f"not TOML: {error}", f"{file}:{line[1]}" if line else file)) from error
    section, lines = "", {}
    for number, text in enumerate(source.splitlines(), 1):
        if head := re.match(r"\s*\[+([^\]]+)\]", text):
            section = f"{head[1].strip()}."
        elif key := re.match(r"\s*([\w.\-]+)\s*=", text):
            lines[f"{section}{key[1]}"] = f"{file}:{number}"
    return [Setting(name, value, lines.get(name, file)) for name, value in _flat(content, "")]


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_python(source: str, file: str, name: str | None) -> list[Setting]:
    """The settings in the `return ...Config(...)` of the function `name`, which may be left out if there is one.

    The code is read, not run: a value that is no literal stays as it is written. Raises ConfigError.
    """
    try:
        functions = {node.name: node.body[-1] for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise ConfigError(Problem(f"not Python: {error.msg}", f"{file}:{error.lineno}")) from error
    calls = {function: last.value for function, last in functions.items()
             if isinstance(last, ast.Return) and isinstance(last.value, ast.Call) and last.value.keywords}  # fmt: skip
    if name is None and len(calls) == 1:
        name = next(iter(calls))
    if name not in calls:
        cause = f"has {len(calls)} functions that build a configuration" if name is None else f"has no function {name}"
        fix = " or ".join(f"--config {function}" for function in calls)
        raise ConfigError(Problem(f"{file} {cause}", "--config", fix))
    settings = []
    for keyword in calls[name].keywords:
        section, value = keyword.arg or "", keyword.value
        if section == "model_spec" and isinstance(value, ast.Call) and value.args:
            settings.append(_of_argument("model.flavor", value.args[0], file))
        elif isinstance(value, ast.Call):
            settings += [_of_argument(f"{section}.{inner.arg}", inner.value, file) for inner in value.keywords]
        else:
            settings.append(_of_argument(section, value, file))
    model = _MODEL_OF_TITAN.match(name)
    return [*settings, *([Setting("model.name", model[0].replace("seek", "seek_v3"), file)] if model else [])]


def _of_argument(name: str, value: ast.expr, file: str) -> Setting:
    try:
        content = ast.literal_eval(value)
    except ValueError:
        content = ast.unparse(value)[:80]
    return Setting(name, content, f"{file}:{value.lineno}")
