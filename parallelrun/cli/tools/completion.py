"""TAB completion of verbs, tools, groups, keys and their values; Hydra's own knows neither verbs nor values.

The shell calls `parallelrun -sc query=bash` with COMP_LINE and COMP_POINT set. No Hydra, no torch: it must be fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

from parallelrun.base import registry
from parallelrun.base.errors import EXIT_OK, ConfigError, Problem
from parallelrun.cli.help import HYDRA_FLAGS, KINDS, ON_REQUEST, OUR_FLAGS, TOOLS, TRACKERS, VERBS
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, MAPPINGS, known_keys
from parallelrun.config.overrides import NAME_LISTS, SHORT_NAMES
from parallelrun.config.recipes import recipe_files
from parallelrun.config.schema.strategy_keys import SECTIONS, kinds


def is_asked(argv: Sequence[str]) -> bool:
    """Whether this is about completion: `-sc install=bash`, or the shell's own `-sc query=bash`."""
    return any(word in ("-sc", "--shell-completion") for word in argv)


def answer(environment: Mapping[str, str]) -> list[str]:
    """The words that can be completed at the cursor."""
    line = environment.get("COMP_LINE", "")
    point = environment.get("COMP_POINT", "")
    before = line[: int(point)] if point.isdigit() else line
    words = before.split()
    typed = words.pop() if words and not before[-1:].isspace() else ""
    if not words:  # still in the program's own name
        return []
    if len(words) > 1 and words[1] in TOOLS:
        return _starting(typed, _of_tool(words[1], words[2:]))
    first = [*VERBS, *TOOLS] if len(words) == 1 else []
    flags = sorted({*HYDRA_FLAGS, *OUR_FLAGS}) if typed.startswith("-") else []
    return _starting(typed, [*first, *flags, *_keys(typed, words), *_pairs(typed, words)])


def _of_tool(tool: str, words: Sequence[str]) -> list[str]:
    """The words that a tool takes after `words`."""
    if tool == "recipes" and words:
        return [] if words[0] == "ls" else [*recipe_files.find()]
    by_tool = {
        "show": [*recipe_files.find()],
        "ls": [*KINDS, TRACKERS, *ON_REQUEST, "--json"],
        "doctor": ["--json"],
        "recipes": ["ls", "cp", "validate"],
        "runs": ["ls", "show"],
    }
    return by_tool.get(tool, []) if tool != "runs" or not words else []


def _starting(typed: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(typed)]


def _keys(typed: str, words: Sequence[str]) -> list[str]:
    """`tp=`, `model=`, the user's own groups; a level below the typed section: `model.layers=`, `strategy.data.`."""
    if "=" in typed:
        return []
    level = typed.count(".")
    names = (*GROUPS, *SHORT_NAMES, *sorted(presets.user_groups(words)))
    keys = {f"{name}=": None for name in names if name.count(".") == level}
    for name, key in known_keys().items():
        parts = name.split(".")
        if len(parts) > level and not key.is_of_presets:
            keys[".".join(parts[: level + 1]) + ("=" if len(parts) == level + 1 else ".")] = None
    return list(keys)


def _pairs(typed: str, words: Sequence[str]) -> list[str]:
    """`strategy=ptdp`, `schedule=1f1b`, `compile=true`; after a comma the next value of a sweep or list."""
    match = re.match(r"(?P<key>(?:~|\+\+|\+|)[A-Za-z_][\w./]*)=(?P<before>(?:.*[,[])?)", typed)
    if match is None:
        return []
    key = match["key"].lstrip("+~")
    of_users = presets.user_recipes(words) if key == "recipe" else presets.user_options(words, key)
    return [f"{match[0]}{value}" for value in dict.fromkeys([*values(key), *of_users])]


def values(key: str) -> list[str]:
    """The possible values of a key; [] if it takes any number or text."""
    if key in GROUPS:
        return presets.options(key)
    schema_key = known_keys().get(SHORT_NAMES.get(key, key))
    if schema_key is None or key in MAPPINGS:
        return []
    if schema_key.kind == "bool":
        return ["true", "false"]
    if schema_key.name in NAME_LISTS:
        return [*registry.names(TRACKERS), "none"]
    from parallelrun.planner.resolve import shorthands

    axes = {f"strategy.{axis}.kind": axis for axis in SECTIONS}
    if key == "schedule" or key in axes:
        return list(kinds(axes.get(key, "pipeline")))
    if key == "layout":
        return list(shorthands.layouts())
    return ["latest", "auto"] if key == "resume" else list(schema_key.choices)


def respond(words: list[str]) -> int:
    """Answer the shell's TAB: our words, and Hydra's keys and options."""
    is_query = any(word.startswith("query=") for word in words)
    if is_query and "COMP_LINE" not in os.environ:
        raise ConfigError(Problem(f"{' '.join(words)}: only a shell asks for completions", "COMP_LINE",
                                  command="parallelrun -sc install=bash"))  # fmt: skip
    for candidate in answer(os.environ) if is_query else []:
        print(candidate)
    if not is_query:
        from parallelrun.config import compose

        compose.run_hydra(compose.prepare_completion(words), lambda config: None)
    return EXIT_OK
