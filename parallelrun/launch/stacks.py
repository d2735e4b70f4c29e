"""Who hangs: from where every rank was last heard of and what its stack shows. Torch-free.

A rank that waits inside a collective is a victim of the one that does not come; the one that is elsewhere, stopped, or
out of step with all others is the suspect (the majority is healthy: ByteRobust, SOSP 2025, section 4).
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_WAITING_CALL = re.compile(
    r"\.(wait|synchronize|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|recv|send)\("
)
_DEPTH = 4  # innermost frames that are looked at


@dataclass(frozen=True)
class Position:
    """Where a rank is: its last step, whether it is stopped (SIGSTOP), and its main thread's stack, innermost first."""

    step: int
    stopped: bool = False
    frames: tuple[str, ...] = ()
    waiting: bool = False


def pp_rank(step: int, dump: str, stopped: bool) -> Position:
    """Read faulthandler's dump of one process."""
    frames: list[str] = []
    waiting = False
    main_thread = re.split(r"(?m)^(?:Current thread|Thread) .*$", dump)[-1]
    for line in main_thread.splitlines():
        if match := _FRAME.match(line):
            source = linecache.getline(match["file"], int(match["line"])).strip()
            inside = "torch/distributed" in match["file"] or bool(_WAITING_CALL.search(source))
            waiting = waiting or (inside and len(frames) < _DEPTH)
            frames.append(f"{match['function']} ({match['file']}:{match['line']})")
    return Position(step, stopped, tuple(frames), waiting)


def suspects(pp_ranks: Mapping[int, Position]) -> tuple[list[int], str]:
    """The ranks that hold up the others, and why they are suspected; empty when nothing tells them apart."""
    stopped = [rank for rank, at in pp_ranks.items() if at.stopped]
    if stopped:
        return stopped, "stopped (SIGSTOP)"
    silent = [rank for rank, at in pp_ranks.items() if not at.frames]
    if silent and len(silent) < len(pp_ranks):
        return silent, "gave no stack"
    elsewhere = [rank for rank, at in pp_ranks.items() if not at.waiting]
    if elsewhere and len(elsewhere) < len(pp_ranks):
        return elsewhere, f"not in a collective but in {pp_ranks[elsewhere[0]].frames[0]}"
    for what, key in (("at step", lambda at: at.step), ("at", lambda at: at.frames[:2])):
        counts = Counter(key(at) for at in pp_ranks.values())
        common, number = counts.most_common(1)[0]
        odd = [rank for rank, at in pp_ranks.items() if key(at) != common]
        if odd and number > len(odd):
            shown = key(pp_ranks[odd[0]])
            return odd, f"{what} {shown if isinstance(shown, int) else shown[0]}, all others {what} {_short(common)}"
    return [], ""


def is_stopped(pid: int) -> bool:
    """True for a process in state T (SIGSTOP, or a debugger)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _short(common: object) -> object:
    return common[0] if isinstance(common, tuple) and common else common
