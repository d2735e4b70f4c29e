"""Error messages on the screen: one form for all of them, and Hydra's errors translated into it.

error: tp=3: 64 hidden are not divisible by it
  where: tp
  did you mean: tp=2 or tp=4
  try: parallelrun plan tp=2
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from parallelrun.base import user_code
from parallelrun.base.errors import ConfigError, EnvironmentProblem, ParallelrunError, Problem, cause_chain, full_disk
from parallelrun.base.registry import PlugInFailed
from parallelrun.base.wording import wrapped
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, example, known_keys, nearest, nearest_keys

_SHOWN = 20
# a path that cannot be made or opened, whatever asked for it
_OF_THE_PATH = (
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
_NO_HOME = "Could not determine home directory."  # raised by Path.expanduser
_PLUGINS = {  # the packages of Hydra's own plug-ins (https://hydra.cc/docs/plugins), by option
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "colorlog": "hydra-colorlog",
}
_NO_LIST = re.compile(r"Invalid value assigned: (\w+) is not a ListConfig, list or tuple\.")
# Hydra 1.3 names the class that it calls, Hydra 1.4 lets Python's own error pass
_CALL = re.compile(
    r"(\w+(?:Launcher|Sweeper))(?:'.*|\.__init__\(\) got an) unexpected keyword argument '(\w+)'", re.DOTALL
)
_DETAIL = re.compile(r"\s*(full_key|object_type|reference_type|See https?:|To append|Config search path|Available)")


def render(problems: Sequence[Problem], color: bool = False, file: TextIO | None = None) -> str:
    """The text of all `problems`, without a trailing newline. file: where it is printed; commands are not wrapped."""
    lines = [line if line.startswith("  try:") else wrapped(line, file, "    ")
             for problem in problems[:_SHOWN] for line in problem.lines()]  # fmt: skip
    lines += [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join(re.sub("^error:", "\x1b[1;31merror:\x1b[0m", line) if color else line for line in lines)


def report(error: BaseException, verbose: bool) -> int:
    """Write `error` to stderr, with its traceback if `verbose`; return its exit code."""
    if isinstance(error, ParallelrunError):
        problems, code = error.problems, error.exit_code
    else:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if verbose else "the same command with -v, for the traceback"
        problems, code = (Problem(f"unexpected: {cause}", command=hint),), 1
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    color = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(render(problems, color, sys.stderr), file=sys.stderr, flush=True)
    return code


def translate(error: Exception) -> ParallelrunError | None:
    """The error for the user if Hydra or OmegaConf failed while composing; None for any other exception.

    Compares names and attributes instead of isinstance: importing Hydra takes a quarter of a second.
    """
    chain = cause_chain(error)
    room = full_disk(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_PATH and error.filename:
        return EnvironmentProblem(Problem(f"{error.strerror}: {error.filename}", str(error.filename)))
    for link in chain:
        if link is room:
            return EnvironmentProblem(Problem(f"no room to write: {room}", str(room.filename or "the disk")))
        if isinstance(link, ParallelrunError):
            return link
        if isinstance(link, PlugInFailed):
            assert link.__cause__ is not None
            where = " <- ".join(reversed(user_code.frames(link.__cause__)))
            return EnvironmentProblem(Problem(f"{link}: {user_code.reason(link.__cause__)}", where or "plug-in"))
    if isinstance(error, RuntimeError) and str(error) == _NO_HOME:
        return ConfigError(
            Problem(
                "a path begins with ~, and that user has no home directory", "command line", "./~... or the full path"
            )
        )
    for link in chain:  # a group's YAML file in a folder of the user's own
        if (mark := getattr(link, "problem_mark", None)) is not None:
            cause = f"not YAML: {getattr(link, 'problem', None) or link}"
            return ConfigError(Problem(cause, f"{mark.name}:{mark.line + 1}:{mark.column + 1}"))
    names = {base.__name__ for link in chain for base in type(link).__mro__}
    if "MissingConfigException" in names:
        return _missing_plugin(chain) or _missing(next(link for link in chain if hasattr(link, "missing_cfg_file")))
    if isinstance(error, TypeError) and (call := _CALL.search(str(error))) is not None:
        return ConfigError(_plugin_key(call[1], call[2]))
    is_recursion = "RecursionError" in names and any(map(_passed_hydra, chain))
    if not is_recursion and not any(map(_is_of_hydra, chain)):
        return _raised_by_hydra(error)
    texts = [_first_lines(str(link)) for link in chain]
    if is_recursion or "RecursionError" in names or "recursi" in " ".join(texts).lower():
        return ConfigError(Problem("a ${...} refers to itself", _full_key(chain) or "an interpolation"))
    return _composition(chain, texts)


def _is_hydra_module(module: str) -> bool:
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def _is_of_hydra(link: BaseException) -> bool:
    return _is_hydra_module(type(link).__module__)


def _modules(error: BaseException) -> list[str]:
    """The modules whose code `error` has passed, innermost last."""
    return [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]


def _passed_hydra(error: BaseException) -> bool:
    """Whether any of the innermost frames of `error` belong to Hydra or OmegaConf."""
    return any(map(_is_hydra_module, _modules(error)[-50:]))


def _missing_plugin(chain: list[BaseException]) -> EnvironmentProblem | None:
    """The error for a sweeper, launcher or log format of a Hydra plug-in that is not installed."""
    wanted = next(str(link.missing_cfg_file) for link in chain if hasattr(link, "missing_cfg_file"))
    match = re.fullmatch(r"hydra/(sweeper|launcher|hydra_logging|job_logging)/(\w+)", wanted.removesuffix(".yaml"))
    package = _PLUGINS.get(match[2]) if match else None
    if match is None or package is None:
        return None
    cause = f"hydra/{match[1]}={match[2]} needs the package {package}, which is not installed"
    return EnvironmentProblem(Problem(cause, f"hydra/{match[1]}", command=f"pip install {package}"))


def _missing(error: BaseException) -> ConfigError:
    """The error for an unknown option of a group, or an unknown file."""
    wanted = str(getattr(error, "missing_cfg_file", "") or "")
    group, _, name = wanted.rpartition("/") if wanted.startswith("hydra/") else wanted.partition("/")
    options = list(getattr(error, "options", None) or [])
    if group == "recipe":
        from parallelrun.config.recipes import recipe_files

        options = list(recipe_files.find())
    close = [f"{group}={option}" for option in nearest(name, options) or options[:8]] if group else []
    if group in ("hydra/launcher", "hydra/sweeper"):
        return ConfigError(Problem(f"{group}={name}: no such {group}", group, " or ".join(close)))
    if group.split("/")[0] not in GROUPS:
        return ConfigError(Problem(_first_lines(str(error)), wanted or "configuration", " or ".join(close)))
    return ConfigError(presets.unknown(group, name, options))


def _composition(chain: list[BaseException], texts: list[str]) -> ConfigError:
    # a resolver's own exception (`KeyError: b'HOME'`) says less than OmegaConf's message about it
    of_hydra = [text for text, link in zip(texts, chain) if _is_of_hydra(link) and "$VALUE" not in text]
    first, cause = texts[0], of_hydra[-1] if of_hydra else texts[-1]
    key = _full_key(chain)
    if (call := _CALL.search(f"{first} {cause}")) is not None:
        return ConfigError(_plugin_key(call[1], call[2]))
    unset = re.search(r"Environment variable '([^']+)' not found", cause)
    if unset:
        text = f"the environment variable {unset[1]} is not set"
        suggestion = f"${{oc.env:{unset[1]},DEFAULT}}, with a default value"
        return ConfigError(Problem(text, key or "configuration", suggestion))
    override = getattr(chain[0], "override", None)
    if override:
        return ConfigError(Problem(f"{override}: {first}", "command line", command="parallelrun --help"))
    unknown = re.search(r"Key '([^']+)'|Could not override '([^']+)'", f"{cause} {first}")
    if unknown and ("not in" in cause or "Could not override" in first):
        name = key or unknown[1] or unknown[2]
        suggestion = f"+{name}=..." if name.startswith("hydra.") else ", ".join(nearest_keys(name))
        return ConfigError(Problem(f"{name}: no such key", "configuration", suggestion, "parallelrun --help"))
    schema_key = known_keys().get(key.partition("[")[0])
    cause = _NO_LIST.sub(r"one of its items is of type \1 and must be a list", cause)
    text = cause if "merging override" not in first else f"{first.replace('Error merging override ', '')}: {cause}"
    return ConfigError(Problem(text, key or "configuration", example(schema_key) if schema_key else ""))


def _plugin_key(plugin: str, wrong: str) -> Problem:
    """The problem with a key that Hydra's launcher or sweeper of the class `plugin` does not take."""
    from inspect import signature

    from hydra.plugins.launcher import Launcher
    from hydra.plugins.sweeper import Sweeper

    is_launcher = plugin.endswith("Launcher")
    classes: list[type] = (Launcher if is_launcher else Sweeper).__subclasses__()
    tried = [cls for cls in classes if cls.__name__ == plugin]  # Hydra has imported it
    legal = [key for cls in tried for key in signature(cls).parameters]
    section = "hydra.launcher" if is_launcher else "hydra.sweeper"
    cause = f"{section}.{wrong}: no such key; {section} has {', '.join(legal) or 'no keys'}"
    return Problem(cause, f"{section}.{wrong}", " or ".join(f"{section}.{key}=..." for key in nearest(wrong, legal)))


def _full_key(chain: list[BaseException]) -> str:
    return next((str(key) for link in reversed(chain) if (key := getattr(link, "full_key", None))), "")


def _raised_by_hydra(error: Exception) -> ConfigError | None:
    """The error for a plain ValueError or OSError that Hydra raised (`--resolve` alone, a missing config folder)."""
    if any(map(_is_hydra_module, _modules(error)[-1:])) and isinstance(error, (ValueError, OSError)):
        return ConfigError(Problem(_first_lines(str(error)), "command line", command="parallelrun --hydra-help"))
    return None


def _first_lines(text: str) -> str:
    """A Hydra message without its details, hints and links."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if _DETAIL.match(line) or (not line.strip() and lines):
            break
        lines.append(line.strip())
    return " ".join(lines)
