"""Whether the launcher can still be reached from a host, as the kernel knows it: a cut network ends no connection.

The agent of a host that is cut off must end its ranks, because the run may go on without them. It cannot ask the
launcher, which the user may have stopped (Ctrl-Z) while the run goes on. So it sends a message now and then, and looks
whether the launcher's host has acknowledged it. Linux only: elsewhere the ranks end after `timeout_s`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

RESENT = 5  # times; the kernel waits at least 0.2 s, then twice as long, and so on: 6.2 s in all
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_unanswered(environ: Mapping[str, str], tables: tuple[Path, ...] = _TABLES) -> bool:
    """Return whether the kernel has sent the same data RESENT times over the connection of sshd, in vain.

    environ: with sshd's SSH_CONNECTION. tables: the format is that of proc_net_tcp in the kernel's documentation.
    """
    fields = environ.get("SSH_CONNECTION", "").split()
    if len(fields) != 4:
        return False
    found = list(_resent(server_port=int(fields[3]), client_port=int(fields[1]), tables=tables))
    return bool(found) and min(found) >= RESENT


def _resent(server_port: int, client_port: int, tables: tuple[Path, ...]) -> Iterator[int]:
    """Yield how often each connection between these ports has sent the same data again."""
    for table in tables:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                ports = [int(address.rpartition(":")[2], 16) for address in columns[1:3]]
                if ports == [server_port, client_port]:
                    yield max(int(columns[6], 16), int(columns[8]))  # probes, if it cannot even send (no route)
