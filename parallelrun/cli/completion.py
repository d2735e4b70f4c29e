"""TAB completion of verbs, tools, groups, keys and their values; Hydra's own knows neither verbs nor values.

The shell calls `parallelrun -sc query=bash` with COMP_LINE and COMP_POINT set. No Hydra, no torch: it must be fast.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from parallelrun.cli.help import HYDRA_FLAGS, KEYS, KINDS, OUR_FLAGS, TOOLS, VERBS
from parallelrun.config import presets, recipes
from parallelrun.config.keys import GROUPS, MAPPINGS, known_keys
from parallelrun.config.strategy_keys import SECTIONS, kinds


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
        of_tools = {"show": [*recipes.find()], "ls": [*KINDS, KEYS, "--json"], "doctor": ["--json"]}
        return _starting(typed, of_tools.get(words[1], []))
    first = [*VERBS, *TOOLS] if len(words) == 1 else []
    flags = sorted({*HYDRA_FLAGS, *OUR_FLAGS}) if typed.startswith("-") else []
    return _starting(typed, [*first, *flags, *_keys(typed), *_pairs(typed)])


def _starting(typed: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(typed)]


def _keys(typed: str) -> list[str]:
    """`tp=`, `model=`, and one level below the typed section: `model.layers=`, `strategy.data.`."""
    if "=" in typed:
        return []
    level = typed.count(".")
    found = {f"{group}=": None for group in GROUPS} if level == 0 else {}
    for name, key in known_keys().items():
        parts = name.split(".")
        if len(parts) > level and not key.is_of_presets:
            found[".".join(parts[: level + 1]) + ("=" if len(parts) == level + 1 else ".")] = None
    return list(found)


def _pairs(typed: str) -> list[str]:
    """`strategy=ptdp`, `schedule=1f1b`, `compile=true`; after a comma the next value of a sweep."""
    match = re.match(r"(?P<key>(?:~|\+\+|\+|)[A-Za-z_][\w.]*)=(?P<before>(?:.*,)?)", typed)
    return [f"{match[0]}{value}" for value in values(match["key"].lstrip("+~"))] if match else []


def values(key: str) -> list[str]:
    """The possible values of a key; [] if it takes any number or text."""
    if key in GROUPS:
        return presets.options(key)
    known = known_keys().get(key)
    if known is None or key in MAPPINGS:
        return []
    if known.kind == "bool":
        return ["true", "false"]
    from parallelrun.plan import shorthands

    axes = {f"strategy.{axis}.kind": axis for axis in SECTIONS}
    if key == "schedule" or key in axes:
        return list(kinds(axes.get(key, "pipeline")))
    if key == "layout":
        return list(shorthands.layouts())
    return ["latest", "auto"] if key == "resume" else list(known.choices)
