"""TAB completion: verbs, tools, groups, keys and their values. Ours alone: Hydra knows neither verbs nor values.

The shell calls `parallelrun -sc query=bash` with COMP_LINE and COMP_POINT set. No Hydra, no torch: it has to be quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from parallelrun.cli.words import HYDRA_FLAGS, OUR_FLAGS, TOOLS, VERBS
from parallelrun.config import presets, recipes
from parallelrun.config.keys import GROUPS, MAPPINGS, Key, known_keys

LISTABLE = ("recipes", "models", "strategies", "datasets", "optimizers", "precisions", "clusters")
_ONE_OF_A_PRESET = ("preset", "description", "demo", "own_axis", "router", "verb")  # keys that no user types


def is_asked(argv: Sequence[str]) -> bool:
    """Whether this is about completion: `-sc install=bash`, or the shell's own `-sc query=bash`."""
    return any(word in ("-sc", "--shell-completion") for word in argv)


def answer(environment: Mapping[str, str]) -> list[str]:
    """What may stand where the cursor is."""
    line = environment.get("COMP_LINE", "")
    point = environment.get("COMP_POINT", "")
    before = line[: int(point)] if point.isdigit() else line
    words = before.split()
    typed = words.pop() if words and not before[-1:].isspace() else ""
    if not words:  # still in the program's own name
        return []
    if len(words) > 1 and words[1] in TOOLS:
        return _starting(typed, _of_tool(words[1]))
    first = [*VERBS, *TOOLS] if len(words) == 1 else []
    return _starting(typed, [*first, *_flags(typed), *_keys(typed), *_pairs(typed)])


def _starting(typed: str, candidates: Iterable[str]) -> list[str]:
    return [candidate for candidate in candidates if candidate.startswith(typed)]


def _of_tool(tool: str) -> list[str]:
    if tool == "show":
        return list(recipes.find())
    if tool == "ls":
        return [*LISTABLE, "--json"]
    return ["--json"] if tool == "doctor" else []


def _flags(typed: str) -> list[str]:
    return sorted({*HYDRA_FLAGS, *OUR_FLAGS}) if typed.startswith("-") else []


def _keys(typed: str) -> list[str]:
    """`tp=`, `model=`, and below what is typed one level more: `model.layers=`, `strategy.data.`."""
    if "=" in typed:
        return []
    level = typed.count(".")
    found = {f"{group}=": None for group in GROUPS} if level == 0 else {}
    for name in known_keys():
        parts = name.split(".")
        if parts[-1] in _ONE_OF_A_PRESET or (len(parts) > 1 and parts[-1] == "name"):
            continue
        if len(parts) > level:
            found[".".join(parts[: level + 1]) + ("=" if len(parts) == level + 1 else ".")] = None
    return list(found)


def _pairs(typed: str) -> list[str]:
    """`strategy=ptdp`, `schedule=1f1b`, `compile=true`; after a comma the next value of a sweep."""
    match = re.match(r"(?P<key>(?:~|\+\+|\+|)[A-Za-z_][\w.]*)=(?P<before>(?:.*,)?)", typed)
    if match is None:
        return []
    return [f"{match[0]}{value}" for value in values(match["key"].lstrip("+~"))]


def values(key: str) -> list[str]:
    """The values that a key is known to take; [] where it takes any number or text."""
    if key in GROUPS:
        return presets.options(key)
    known: Key | None = known_keys().get(key)
    if known is None or key in MAPPINGS:
        return []
    if known.kind == "bool":
        return ["true", "false"]
    from parallelrun.models.transformer import spec as transformer
    from parallelrun.plan import rules, shorthands

    axes = {f"strategy.{axis}.kind": axis for axis in ("data", "tensor", "pipeline", "expert")}
    if key == "schedule" or key in axes:
        return list(shorthands.kinds(axes.get(key, "pipeline")))
    listed = {
        **rules.CHOICES,
        **{f"model.{name}": legal for name, legal in transformer.CHOICES.items()},
        "layout": tuple(shorthands.layouts()),
        "device": ("auto", "cpu", "cuda"),
        "consistency": ("sync", "async", "ssp"),
        "strategy.data.consistency": ("sync", "async", "ssp"),
        "resume": ("latest",),
    }
    return list(listed.get(key, ()))
