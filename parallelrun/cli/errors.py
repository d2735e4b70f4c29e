"""What goes wrong, on screen: the one shape of every message, and Hydra's errors brought into it.

error: tp=3: 64 hidden do not divide by it
  where: tp
  did you mean: tp=2 or tp=4
  try: parallelrun plan tp=2
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence

from parallelrun import reserve
from parallelrun.config.keys import GROUPS, nearest, nearest_keys
from parallelrun.errors import ConfigError, EnvironmentProblem, ParallelrunError, Problem

_SHOWN = 20
_PLUGINS = {  # Hydra's own (https://hydra.cc/docs/plugins), by what a user chooses
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
_DETAIL = re.compile(r"\s*(full_key|object_type|reference_type|See https?:|To append|Config search path|Available)")


def render(problems: Sequence[Problem], color: bool = False) -> str:
    """The text of `problems`, all of them, first line first; without a trailing newline."""
    red, plain = ("\x1b[1;31m", "\x1b[0m") if color else ("", "")
    lines = []
    for problem in problems[:_SHOWN]:
        lines.append(f"{red}error:{plain} {_one_line(problem.what)}")
        for label, text in (
            ("where", problem.where),
            ("did you mean", problem.suggestion),
            ("try", problem.command),
        ):
            if text:
                lines.append(f"  {label}: {_one_line(text)}")
    if len(problems) > _SHOWN:
        lines.append(f"... and {len(problems) - _SHOWN} more")
    return "\n".join(lines)


def report(error: BaseException, verbose: bool) -> int:
    """Write `error` to stderr (with its traceback if `verbose`); the exit code it stands for."""
    known = error if isinstance(error, ParallelrunError) else None
    if known is None:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if verbose else "the same command with -v, for the traceback"
        problems: tuple[Problem, ...] = (Problem(f"unexpected: {what}", command=hint),)
    else:
        problems = known.problems
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    color = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(render(problems, color), file=sys.stderr, flush=True)
    return known.exit_code if known is not None else 1


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:2000]


def translate(error: Exception) -> ParallelrunError | None:
    """A ConfigError for what Hydra or OmegaConf raise while composing, None for any other exception.

    Told by name and attributes instead of isinstance: importing Hydra costs a quarter of a second.
    """
    if isinstance(error, ParallelrunError):
        return error
    chain = _chain(error)
    if isinstance(error, OSError) and error.errno in reserve.NO_ROOM:
        return EnvironmentProblem(Problem(f"no room to write: {error}", str(error.filename or "the disk")))
    for link in chain:
        if isinstance(link, ParallelrunError):
            return link
    marked = next((link for link in chain if getattr(link, "problem_mark", None) is not None), None)
    if marked is not None:  # a YAML file of a group, in a folder of the user's own
        mark = marked.problem_mark  # type: ignore[attr-defined]
        what = f"not YAML: {getattr(marked, 'problem', None) or marked}"
        return ConfigError(Problem(what, f"{mark.name}:{mark.line + 1}:{mark.column + 1}"))
    names = {name for link in chain for name in (base.__name__ for base in type(link).__mro__)}
    if "MissingConfigException" in names:
        return _missing_plugin(chain) or _missing(next(link for link in chain if hasattr(link, "missing_cfg_file")))
    from_hydra = any(map(_of_hydra, chain))
    if not from_hydra and not ("RecursionError" in names and any(map(_passed_hydra, chain))):
        return _of_hydra_frames(error)
    texts = [_first_lines(str(link)) for link in chain]
    if "RecursionError" in names or "recursi" in " ".join(texts).lower():
        return ConfigError(Problem("a ${...} leads back to itself", _full_key(chain) or "an interpolation"))
    return _composition(chain, texts)


def _is_of_hydra(module: str) -> bool:
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def _passed_hydra(error: BaseException) -> bool:
    """Whether Hydra or OmegaConf raised `error`: its innermost frames are theirs."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(_is_of_hydra(module) for module in frames[-50:])


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _missing_plugin(chain: list[BaseException]) -> EnvironmentProblem | None:
    """A sweeper, launcher or log format of Hydra's own plugins, which is a package that is not installed."""
    wanted = next(str(link.missing_cfg_file) for link in chain if hasattr(link, "missing_cfg_file"))
    match = re.fullmatch(r"hydra/(sweeper|launcher|hydra_logging|job_logging)/(\w+)", wanted.removesuffix(".yaml"))
    package = _PLUGINS.get(match[2]) if match else None
    if match is None or package is None:
        return None
    what = f"hydra/{match[1]}={match[2]} needs the package {package}, which is not installed"
    return EnvironmentProblem(Problem(what, f"hydra/{match[1]}", command=f"pip install {package}"))


def _of_hydra(link: BaseException) -> bool:
    return _is_of_hydra(type(link).__module__)


def _missing(error: BaseException) -> ConfigError:
    """An unknown option of a group, or an unknown file."""
    wanted = str(getattr(error, "missing_cfg_file", "") or "")
    group, _, name = wanted.partition("/")
    options = list(getattr(error, "options", None) or [])
    if group.split("/")[0] not in GROUPS:
        close = [f"{group}={option}" for option in nearest(name, options) or options[:8]] if group else []
        return ConfigError(Problem(_first_lines(str(error)), wanted or "configuration", " or ".join(close)))
    if group == "recipe":
        from parallelrun.config import recipes

        options = list(recipes.find())
    close = nearest(name, options) or options[:8]
    suggestion = ", ".join(f"{group}={option}" for option in close)
    return ConfigError(Problem(f"{group}={name}: no such {group}", group, suggestion, f"parallelrun ls {group}"))


def _composition(chain: list[BaseException], texts: list[str]) -> ConfigError:
    # a resolver's own exception (`KeyError: b'HOME'`) says less than what OmegaConf makes of it
    of_hydra = [text for text, link in zip(texts, chain) if _of_hydra(link) and "$VALUE" not in text]
    first, cause = texts[0], of_hydra[-1] if of_hydra else texts[-1]
    unset = re.search(r"Environment variable '([^']+)' not found", cause)
    if unset:
        what = f"the environment variable {unset[1]} is not set"
        suggestion = f"${{oc.env:{unset[1]},DEFAULT}}, with a value for where it is not set"
        return ConfigError(Problem(what, _full_key(chain) or "configuration", suggestion))
    override = getattr(chain[0], "override", None)
    if override:
        return ConfigError(Problem(f"{override}: {first}", "command line", command="parallelrun --help"))
    key = _full_key(chain)
    unknown = re.search(r"Key '([^']+)'|Could not override '([^']+)'", f"{cause} {first}")
    if unknown and ("not in" in cause or "Could not override" in first):
        name = key or unknown[1] or unknown[2]
        suggestion = ", ".join(nearest_keys(name))
        return ConfigError(Problem(f"{name}: no such key", "configuration", suggestion, "parallelrun --help"))
    what = cause if "merging override" not in first else f"{first.replace('Error merging override ', '')}: {cause}"
    return ConfigError(Problem(what, key or "configuration"))


def _full_key(chain: list[BaseException]) -> str:
    for link in reversed(chain):
        key = getattr(link, "full_key", None)
        if key:
            return str(key)
    return ""


def _of_hydra_frames(error: Exception) -> ConfigError | None:
    """A plain ValueError or OSError that Hydra itself raised (`--resolve` alone, a config folder that is missing)."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    if raised_in.split(".")[0] in ("hydra", "omegaconf") and isinstance(error, (ValueError, OSError)):
        return ConfigError(Problem(_first_lines(str(error)), "command line", command="parallelrun --hydra-help"))
    return None


def _first_lines(text: str) -> str:
    """The part of a message of Hydra's that says what is wrong: up to its details, hints and links."""
    lines: list[str] = []
    for line in text.strip().splitlines():
        if re.match(
            r"\s*(full_key|object_type|reference_type|See https?:|To append|Config search path|Available)", line
        ):
            break
        if not line.strip() and lines:
            break
        lines.append(line.strip())
    return " ".join(lines)
