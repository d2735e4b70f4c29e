"""Completion with verbs: Hydra's own, shown a command line without the verb. The verbs and tools we answer ourselves.

The shell calls `parallelrun -sc query=bash` with COMP_LINE and COMP_POINT set; Hydra stumbles over a bare word there.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence

from parallelrun.cli.words import TOOLS, VERBS
from parallelrun.config import recipes
from parallelrun.config.keys import GROUPS

LISTABLE = ("recipes", "models", "strategies", "datasets", "optimizers", "precisions", "clusters")


def is_asked(argv: Sequence[str]) -> bool:
    """Whether this is about completion: `-sc install=bash`, or the shell's own `-sc query=bash`."""
    return any(word in ("-sc", "--shell-completion") for word in argv)


def answer(environment: MutableMapping[str, str]) -> tuple[list[str], bool]:
    """(candidates of our own, whether Hydra should be asked too). Takes the verb out of COMP_LINE and COMP_POINT."""
    line = environment.get("COMP_LINE", "")
    point = environment.get("COMP_POINT", "")
    cursor = int(point) if point.isdigit() else len(line)
    match = re.match(r"(\s*\S+\s+)(\S*)(\s+|$)", line)
    if match is None:
        return [], True
    program, first, gap = match.groups()
    if cursor <= match.end(2):  # still in the first word
        typed = line[match.start(2) : cursor]
        words = [word for word in (*VERBS, *TOOLS) if word.startswith(typed)]
        return words, "=" in typed or not typed or any(group.startswith(typed) for group in GROUPS)
    last = line[:cursor].rpartition(" ")[2]
    if first in TOOLS:
        candidates = _of_tool(first)
        return [word for word in candidates if word.startswith(last)], False
    if first in VERBS:
        removed = len(first) + len(gap)
        environment["COMP_LINE"] = program + line[match.end(3) :]
        environment["COMP_POINT"] = str(cursor - removed)
    return [], True


def _of_tool(tool: str) -> list[str]:
    if tool == "show":
        return list(recipes.find())
    if tool == "ls":
        return [*LISTABLE, "--json"]
    return ["--json"] if tool == "doctor" else []
