"""horovodrun's `-np N -H h1:4,h2:4`: which ranks run on which host, and the commands that start them there. No torch.

Slots are filled in the order in which hosts are listed; what is left over stays idle. Slots of this host are started;
for every other host the exact command is printed (torchrun's words, so that all of them meet).
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from parallelrun.errors import ConfigError, EnvironmentProblem, Problem

COMMAND_LINE = "command line"
_ENTRY = re.compile(r"(?P<name>\[[0-9a-fA-F:]+\]|[A-Za-z0-9][A-Za-z0-9._-]*)(:(?P<slots>[1-9][0-9]{0,6}))?")
_NUMBER = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class Host:
    """A host with its slots; None where none were given: as many as are asked for."""

    name: str
    slots: int | None

    @property
    def is_this_one(self) -> bool:
        """Whether this process runs there."""
        here = socket.gethostname()
        return self.name in ("localhost", "127.0.0.1", "[::1]", here, here.partition(".")[0])


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host: `num_ranks` of them, the first of which is number `first_rank` of the world."""

    host: Host
    first_rank: int
    num_ranks: int

    @property
    def ranks(self) -> str:
        """In words."""
        last = self.first_rank + self.num_ranks - 1
        return f"rank {last}" if self.num_ranks == 1 else f"ranks {self.first_rank} to {last}"


def read(ranks: str | None, hosts: str | None) -> tuple[HostRanks, ...]:
    """The ranks of `-np ranks -H hosts`, () where neither is given. Without -np all slots are used; without -H all
    ranks are on this host. Raises ConfigError in horovodrun's words."""
    if ranks is None and hosts is None:
        return ()
    if ranks is not None and not _NUMBER.fullmatch(ranks):
        raise ConfigError(Problem(f"-np {ranks}: a number of ranks, at least 1", COMMAND_LINE, "-np 2"))
    listed = _listed(hosts) if hosts is not None else [Host("localhost", None)]
    asked = int(ranks) if ranks is not None else sum(host.slots or 1 for host in listed)
    if all(host.slots is not None for host in listed) and asked > sum(host.slots or 0 for host in listed):
        available = sum(host.slots or 0 for host in listed)
        what = f"Requested more processes ({asked}) than there are available slots ({available})"
        raise ConfigError(Problem(what, f"-H {hosts}", f"-np {available}"))
    return fill(listed, asked)


def fill(hosts: Sequence[Host], num_ranks: int) -> tuple[HostRanks, ...]:
    """Ranks on hosts in the order given; hosts for which none is left are not in the answer."""
    out, first = [], 0
    for host in hosts:
        here = min(num_ranks - first, num_ranks if host.slots is None else host.slots)
        if here > 0:
            out.append(HostRanks(host, first, here))
            first += here
    return tuple(out)


def _listed(text: str) -> list[Host]:
    found = [(_ENTRY.fullmatch(entry), entry) for entry in text.split(",")]
    wrong = [entry for match, entry in found if match is None]
    if wrong:
        what = f"-H {text}: {wrong[0]!r} is no host with slots, as in h1:4,h2:4"
        raise ConfigError(Problem(what, COMMAND_LINE, "-H localhost:2"))
    slots: dict[str, int | None] = {}
    for match, _ in found:
        if match is not None:
            given = int(match["slots"]) if match["slots"] else None
            before = slots.get(match["name"], 0)
            slots[match["name"]] = None if given is None or before is None else before + given
    return [Host(name, count) for name, count in slots.items()]


def has_others(placed: Sequence[HostRanks]) -> bool:
    """Whether some ranks belong on other hosts."""
    return any(not one.host.is_this_one for one in placed)


def commands(placed: Sequence[HostRanks], words: Sequence[str], port: int, directory: str) -> list[str]:
    """What to type on each host, in order; `words` are parallelrun's own, without -np and -H."""
    out = []
    for number in range(len(placed)):
        launcher = ["torchrun", *_torchrun(placed, number, port), "-m", "parallelrun", *words]
        out.append(f"cd {shlex.quote(directory)} && {shlex.join(launcher)}")
    return out


def _torchrun(placed: Sequence[HostRanks], number: int, port: int) -> list[str]:
    first = placed[0].host.name.strip("[]")
    if first == "localhost":  # which the others would take for themselves
        first = socket.gethostname()
    return [
        f"--nnodes={len(placed)}",
        f"--node-rank={number}",
        f"--nproc-per-node={placed[number].num_ranks}",
        f"--master-addr={first}",
        f"--master-port={port}",
    ]


def start(placed: Sequence[HostRanks], words: Sequence[str]) -> int:
    """Print what to type on the other hosts, and become torchrun for the slots of this one.

    Raises EnvironmentProblem where none of the hosts is this one. Otherwise it does not return.
    """
    own_words, port = without_hosts(words), free_port()
    here = next((number for number, one in enumerate(placed) if one.host.is_this_one), None)
    for one, command in zip(placed, commands(placed, own_words, port, os.getcwd())):
        if not one.host.is_this_one or here is None:
            print(f"on {one.host.name} ({one.ranks}):\n  {command}")
    if here is None:
        what = f"none of the hosts of -H is this one ({socket.gethostname()}): nothing was started"
        raise EnvironmentProblem(Problem(what, COMMAND_LINE, "run the commands above, each on its host"))
    print(f"here: {placed[here].ranks}, waiting for the others", flush=True)
    program = [sys.executable, "-m", "torch.distributed.run", *_torchrun(placed, here, port)]
    os.execv(sys.executable, [*program, "-m", "parallelrun", *own_words])


def without_hosts(words: Sequence[str]) -> list[str]:
    """The command line without -np and -H and their values."""
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-np", "-H"):
            del rest[:1]
        else:
            out.append(word)
    return out


def free_port() -> int:
    """A port that nobody listens on here now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
