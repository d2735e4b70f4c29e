"""Recognises the format of a file by its content, and reads its settings."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, EnvironmentProblem, Problem
from parallelrun.cli.flag_formats.settings import Setting, Translation
from parallelrun.cli.flag_formats.shell import ShellWord, commands
from parallelrun.cli.flag_formats.table import table_of, translate

_MAX_BYTES = 2**20
_LAUNCHER = ("--nproc_per_node", "--nproc-per-node", "--nnodes")
_TABLE_OF_TITAN = re.compile(r"^\s*\[(parallelism|training|model|activation_checkpoint|lr_scheduler)\]", re.MULTILINE)
_FUNCTION_OF_TITAN = re.compile(r"^def \w+\(.*?return [\w.]*Config\(", re.MULTILINE | re.DOTALL)
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

    def translate(self) -> Translation:
        """The recipe for the settings."""
        return translate(self.format, self.settings)


def of_words(words: Sequence[str]) -> OtherRun:
    """The command line of pretrain_gpt.py, or its arguments alone. Raises ConfigError."""
    settings = _of_command([ShellWord(word, 0) for word in words], "command line")
    if not settings:
        cause = "after -- there are no arguments of Megatron-LM such as --num-layers 24"
        raise ConfigError(Problem(cause, "command line", command="parallelrun import-flags --help"))
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
    if source.lstrip().startswith("{"):
        return OtherRun("deepspeed", shown, _checked(_of_json(source, shown), "deepspeed", shown))
    if _FUNCTION_OF_TITAN.search(source):
        return OtherRun("torchtitan", shown, _of_python(source, shown, function))
    if _TABLE_OF_TITAN.search(source):
        return OtherRun("torchtitan", shown, _of_toml(source, shown))
    if _ARGUMENT_OF_MEGATRON.search(source) and (settings := _of_script(source, shown)) is not None:
        return OtherRun("megatron", shown, settings)
    return OtherRun("accelerate", shown, _checked(_of_yaml(source, shown), "accelerate", shown))


def _checked(settings: Sequence[Setting], name: str, shown: str) -> Sequence[Setting]:
    if any(setting.name.partition(".")[0] in table_of(name)["marks"] for setting in settings):
        return settings
    cause = (
        "not recognised as arguments of Megatron-LM, a job of torchtitan, or a configuration of DeepSpeed or accelerate"
    )
    raise ConfigError(Problem(cause, shown, command="parallelrun import-flags --help"))


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
    words = max(commands(script), key=lambda words: sum(word.text.startswith("--") for word in words), default=[])
    return _of_command(words, file) if any(word.text.startswith("--") for word in words) else None


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
        if index > program or name in _LAUNCHER:
            where = f"{file}:{word.line}" if word.line else file
            settings[name] = Setting(name, values if len(values) > 1 else values[0] if values else True, where)
    return list(settings.values())


def _of_toml(source: str, file: str) -> list[Setting]:
    """The settings of a TOML file, as `section.key`. Raises ConfigError with its line if it is not TOML."""
    try:
        import tomllib
    except ImportError as error:
        cause = "reading TOML needs Python 3.11"
        raise EnvironmentProblem(Problem(cause, file)) from error
    try:
        content = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ConfigError(Problem(f"not TOML: {error}", f"{file}:{line[1]}" if line else file)) from error
    lines = _lines_of_toml(source)
    return [
        Setting(name, value, f"{file}:{lines[name]}" if name in lines else file) for name, value in _flat(content, "")
    ]


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _lines_of_toml(source: str) -> dict[str, int]:
    section, lines = "", {}
    for line, content in enumerate(source.splitlines(), 1):
        if head := re.match(r"\s*\[+([^\]]+)\]", content):
            section = f"{head[1].strip()}."
        elif key := re.match(r"\s*([\w.\-]+)\s*=", content):
            lines[f"{section}{key[1]}"] = line
    return lines


def _of_python(source: str, file: str, name: str | None) -> list[Setting]:
    """The settings in the `return ...Config(...)` of the function `name`, which may be left out if there is one.

    The code is read, not run: values that are no literals are left out. Raises ConfigError.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(Problem(f"not Python: {error.msg}", f"{file}:{error.lineno}")) from error
    functions = {one.name: call for one in tree.body if isinstance(one, ast.FunctionDef) and (call := _returned(one))}
    if name is None and len(functions) == 1:
        name = next(iter(functions))
    if name not in functions:
        cause = f"{file} has {len(functions)} functions that build a configuration" if name is None else (
            f"{file} has no function {name} that returns a configuration")  # fmt: skip
        raise ConfigError(Problem(cause, "--config", " or ".join(f"--config {one}" for one in functions)))
    settings = []
    for keyword in functions[name].keywords:
        section, value = keyword.arg or "", keyword.value
        if section == "model_spec" and isinstance(value, ast.Call) and value.args:
            flavor = _literal(value.args[0])
            settings.append(Setting("model.flavor", flavor, f"{file}:{value.lineno}"))
        elif isinstance(value, ast.Call):
            settings += [_setting(f"{section}.{one.arg}", one.value, file) for one in value.keywords]
        else:
            settings.append(_setting(section, value, file))
    family = name.partition("_")[0] if name.partition("_")[0] in ("llama3", "llama4", "qwen3") else None
    family = "deepseek_v3" if name.startswith("deepseek") else family
    return [*settings, *([Setting("model.name", family, file)] if family else [])]


def _returned(function: ast.FunctionDef) -> ast.Call | None:
    """The call in the function's last `return`, if it is one with names."""
    last = function.body[-1]
    call = last.value if isinstance(last, ast.Return) else None
    return call if isinstance(call, ast.Call) and call.keywords else None


def _setting(name: str, value: ast.expr, file: str) -> Setting:
    return Setting(name, _literal(value), f"{file}:{value.lineno}")


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)[:80]
