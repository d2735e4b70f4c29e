"""horovodrun's `-np N -H h1:4,h2:4` or `--hostfile FILE`: the ranks of each host, which `launch/over_ssh/ssh.py`
starts.

Slots are filled in the order in which hosts are listed; remaining slots stay idle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_NUMBER = re.compile(r"[1-9][0-9]{0,6}")
# `name` or `name:8` (Horovod), `name slots=8 max_slots=16` (OpenMPI, DeepSpeed)
_HOST = re.compile(
    r"(?P<name>\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)"
    r"((:|\s+slots=)(?P<slots>[1-9][0-9]{0,6}))?(\s+max[_-]slots=[0-9]+)?"
)


@dataclass(frozen=True)
class HostRanks:
    """The ranks of the host `name`: `num_ranks` ranks from `first_rank` on."""

    name: str
    first_rank: int
    num_ranks: int

    @property
    def is_here(self) -> bool:
        """Whether this process runs on the host."""
        here = os.uname().nodename
        return self.name in ("localhost", "127.0.0.1", "[::1]", here, here.partition(".")[0])


def place_ranks(ranks: str | None, hosts: str | None, hostfile: str | None = None) -> tuple[HostRanks, ...]:
    """Return the ranks of `-np ranks -H hosts`, () if none is given. Raises ConfigError with horovodrun's message.

    Without -np all slots are used; without hosts all ranks run on this one. Hosts that get no rank are left out.
    hostfile: a file with a host on each line, instead of -H.
    """
    if hosts is not None and hostfile is not None:
        raise ConfigError(Problem("the hosts are given twice, by -H and by --hostfile", COMMAND_LINE))
    if ranks is None and hosts is None and hostfile is None:
        return ()
    if ranks is not None and not _NUMBER.fullmatch(ranks):
        raise ConfigError(Problem(f"-np {ranks}: must be a number of ranks, at least 1", COMMAND_LINE, "-np 2"))
    listed = ((f"-H {hosts}", entry) for entry in ("localhost" if hosts is None else hosts).split(","))
    slots = _slots(listed if hostfile is None else _lines(Path(hostfile)))
    num_ranks = int(ranks) if ranks is not None else sum(count or 1 for count in slots.values())
    available = sum(num_ranks if count is None else count for count in slots.values())
    if num_ranks > available:
        message = f"Requested more processes ({num_ranks}) than there are available slots ({available})"
        raise ConfigError(Problem(message, COMMAND_LINE, f"-np {available}"))
    placed, first = [], 0
    for name, count in slots.items():
        on_host = min(num_ranks - first, num_ranks if count is None else count)
        placed.append(HostRanks(name, first, on_host))
        first += on_host
    return tuple(host for host in placed if host.num_ranks)


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a hostfile that name a host, each after its place in the file."""
    try:
        if not (file.is_file() or file.parent == Path("/dev/fd")):  # `--hostfile <(...)`; a pipe without writer blocks
            raise OSError("there is no such file")
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
        if not any(lines):
            raise OSError("it names no host")
    except (OSError, UnicodeDecodeError) as error:
        message = f"--hostfile {file}: cannot be read ({error})"
        raise ConfigError(Problem(message, COMMAND_LINE, "--hostfile FILE, with `h1 slots=4` on each line")) from error
    yield from ((f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line)


def _slots(entries: Iterable[tuple[str, str]]) -> dict[str, int | None]:
    """Return the slots of each host; None (not given) means as many as needed. entries: (place, host with slots)."""
    slots: dict[str, int | None] = {}
    problems = []
    for place, entry in entries:
        if (match := _HOST.fullmatch(entry)) is None:
            message = f"{place}: {entry!r} is not a host with slots, as in h1:4,h2:4"
            problems.append(Problem(message, COMMAND_LINE, "-H localhost:2"))
            continue
        count, before = match["slots"], slots.get(match["name"], 0)
        slots[match["name"]] = None if count is None or before is None else before + int(count)
    if problems:
        raise ConfigError(*problems)
    return slots


def has_others(hosts: Sequence[HostRanks]) -> bool:
    """Return whether some ranks run on other hosts."""
    return any(not host.is_here for host in hosts)
