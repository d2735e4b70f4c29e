"""horovodrun's `-np N -H h1:4,h2:4` or `--hostfile FILE`: the ranks of each host, which `launch/over_ssh/ssh.py`
starts.

Slots are filled in the order in which hosts are listed; remaining slots stay idle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallelrun.base.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_ENTRY = re.compile(r"(?P<name>\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<slots>[1-9][0-9]{0,6}))?")
_LINE = re.compile(r"(?P<name>\S+?)(?:(?::| slots=)(?P<slots>[1-9][0-9]{0,6}))?(?: max[_-]slots=[0-9]+)?")
_NUMBER = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class SshOptions:
    """Options of ssh for reaching the other hosts: its -p, -i and -F."""

    port: str | None = None
    identity_file: str | None = None
    config: str | None = None

    def words(self) -> list[str]:
        """The options for ssh. With an identity file, no other key is offered."""
        out = ["-F", self.config] if self.config else []
        out += ["-p", self.port] if self.port else []
        out += ["-i", self.identity_file, "-o", "IdentitiesOnly=yes"] if self.identity_file else []
        return out

    def problems(self) -> list[Problem]:
        """The mistakes in these options."""
        problems = []
        if self.port is not None and not (_NUMBER.fullmatch(self.port) and int(self.port) < 65536):
            problems.append(Problem(f"--ssh-port {self.port}: not a port (1 to 65535)", COMMAND_LINE, "--ssh-port 22"))
        for flag, file in (("--ssh-identity-file", self.identity_file), ("--ssh-config", self.config)):
            if file is not None and not Path(file).is_file():
                problems.append(Problem(f"{flag} {file}: no such file", COMMAND_LINE))
        return problems


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

    @property
    def ranks(self) -> str:
        """The ranks as a text."""
        last = self.first_rank + self.num_ranks - 1
        return f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"


def read(ranks: str | None, hosts: str | None, hostfile: str | None = None) -> tuple[HostRanks, ...]:
    """The ranks of `-np ranks -H hosts`, () if none is given. Raises ConfigError with horovodrun's message.

    Without -np all slots are used; without hosts all ranks run on this one. Hosts that get no rank come last.
    hostfile: a file with a host on each line, instead of -H.
    """
    if hostfile is not None:
        if hosts is not None:
            raise ConfigError(Problem("the hosts are given twice, by -H and by --hostfile", COMMAND_LINE))
        hosts = _listed(Path(hostfile))
    if ranks is None and hosts is None:
        return ()
    if ranks is not None and not _NUMBER.fullmatch(ranks):
        raise ConfigError(Problem(f"-np {ranks}: must be a number of ranks, at least 1", COMMAND_LINE, "-np 2"))
    slots = _slots(hosts) if hosts is not None else {"localhost": None}
    num_ranks = int(ranks) if ranks is not None else sum(count or 1 for count in slots.values())
    available = sum(num_ranks if count is None else count for count in slots.values())
    if num_ranks > available:
        message = f"Requested more processes ({num_ranks}) than there are available slots ({available})"
        raise ConfigError(Problem(message, f"-H {hosts}", f"-np {available}"))
    out, first = [], 0
    for name, count in slots.items():
        here = min(num_ranks - first, num_ranks if count is None else count)
        out.append(HostRanks(name, first, here))
        first += here
    return tuple(out)


def _listed(file: Path) -> str:
    """The hosts of a file as in -H: `name`, `name:8` (Horovod) or `name slots=8` (OpenMPI, DeepSpeed) on each line."""
    try:
        if not (file.is_file() or file.parent == Path("/dev/fd")):  # `--hostfile <(...)`; a pipe without writer blocks
            raise OSError("there is no such file")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"--hostfile {file}: cannot be read ({error})"
        raise ConfigError(Problem(message, COMMAND_LINE, "--hostfile FILE, with `h1 slots=4` on each line")) from error
    entries, problems = [], []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        match = _LINE.fullmatch(" ".join(words))
        if match is not None:
            entries.append(match["name"] + (f":{match['slots']}" if match["slots"] else ""))
        elif words:
            message = f"{file}, line {number}: {line.strip()!r} is not a host with slots"
            problems.append(Problem(message, "--hostfile", "worker-1 slots=8"))
    if not entries and not problems:
        problems.append(Problem(f"{file} names no host", "--hostfile", "worker-1 slots=8"))
    if problems:
        raise ConfigError(*problems)
    return ",".join(entries)


def _slots(text: str) -> dict[str, int | None]:
    """The slots of each host; None (not given) means as many as needed."""
    slots: dict[str, int | None] = {}
    entries = {entry: _ENTRY.fullmatch(entry) for entry in text.split(",")}
    if wrong := [entry for entry, match in entries.items() if match is None]:
        whats = [f"-H {text}: {entry!r} is not a host with slots, as in h1:4,h2:4" for entry in wrong]
        raise ConfigError(*(Problem(message, COMMAND_LINE, "-H localhost:2") for message in whats))
    for entry in text.split(","):
        match = entries[entry]
        assert match is not None
        count, before = match["slots"], slots.get(match["name"], 0)
        slots[match["name"]] = None if count is None or before is None else before + int(count)
    return slots


def has_others(hosts: Sequence[HostRanks]) -> bool:
    """Whether some ranks run on other hosts."""
    return any(host.num_ranks and not host.is_here for host in hosts)
