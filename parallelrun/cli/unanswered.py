"""Whether another host can still be reached, as the kernel knows it: a cut network ends no connection.

Launcher and agent write to each other now and then, and look whether the other's host has acknowledged it. The kernel
acknowledges data even while the processes of its host wait for a core or are stopped, so load is no cut network. A
probe by another connection would tell no more, and sshd may refuse hosts that connect without logging in
(PerSourcePenalties). Linux only: elsewhere, and through a proxy, ssh's own questions and `timeout_s` must do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RESENT = 5  # times; the kernel waits at least 0.2 s, then twice as long, and so on: 6.2 s in all
RESENT_SOON = 4  # times, 3.0 s: for a run with `restarts`, which a false alarm does not end
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


@dataclass(frozen=True)
class _Connection:
    """A row of the kernel's tables. resent: how often the same data was sent again, in vain."""

    ports: tuple[int, int]
    inode: int
    resent: int


def is_unanswered(environ: Mapping[str, str], resent: int, tables: tuple[Path, ...] = _TABLES) -> bool:
    """Return whether the kernel has sent the same data again so often over the connection of sshd, in vain.

    environ: with sshd's SSH_CONNECTION. tables: the format is that of proc_net_tcp in the kernel's documentation.
    """
    fields = environ.get("SSH_CONNECTION", "").split()
    if len(fields) != 4:
        return False
    ports = (int(fields[3]), int(fields[1]))  # sshd's own sockets are another user's
    found = [one.resent for one in _connections(tables) if one.ports == ports]
    return bool(found) and min(found) >= resent


def unanswered(sockets: Mapping[str, frozenset[int]], resent: int, tables: tuple[Path, ...] = _TABLES) -> list[str]:
    """Return the names whose sockets have sent the same data again so often, in vain. sockets: see `sockets_of`."""
    silent = {one.inode for one in _connections(tables) if one.resent >= resent}
    return [name for name, inodes in sockets.items() if inodes & silent]


def sockets_of(pid: int) -> frozenset[int]:
    """Return the inodes of all sockets of a process of this user."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    found.add(int(inode.strip("[]")))
    return frozenset(found)


def _connections(tables: tuple[Path, ...]) -> Iterator[_Connection]:
    """Yield all TCP connections of this host."""
    for table in tables:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                local, remote = (int(address.rpartition(":")[2], 16) for address in columns[1:3])
                again = max(int(columns[6], 16), int(columns[8]))  # probes, if it cannot even send (no route)
                yield _Connection((local, remote), int(columns[9]), again)
