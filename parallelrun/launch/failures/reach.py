"""Losses that a rank under another launcher detects itself: hosts that do not answer, and a launcher that has exited.

A cut network ends no connection. But the kernel of a host acknowledges data and probes even while its processes are
stopped, so a rank looks whether the connections that it has anyway (gloo's, the store's) are acknowledged. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from parallelrun.base.errors import EXIT_RANK_DIED, Problem
from parallelrun.base.wording import rank_range
from parallelrun.launch.failures.failure import Failure
from parallelrun.launch.host.environment import Attached
from parallelrun.launch.host.heartbeat import HeartbeatFile
from parallelrun.launch.store.rendezvous import Member

RESENT = 5  # times without an answer: after some 7 s
LAUNCHER_LOST = "lost its launcher, which was killed"
MPIRUN_S = 20.0  # until mpirun has noticed a cut itself, by the parameters that docs/cluster.md names
_PROBES = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 100}  # of a connection without data: s, s, times


class Reach:
    """The other hosts of a run, as a rank reaches them. It lets the kernel probe one connection to each."""

    def __init__(self, rank: int, members: Sequence[Member]):
        self._members = members
        others = [member for member in members if member.host != members[rank].host]
        own = set(members[rank].addresses)  # such as that of a bridge for containers, which every host has
        self._host_of = {
            address: member.host for member in others for address in member.addresses if address not in own
        }
        self._connections: dict[str, int] = {}  # descriptors by host
        self._num_others = len({member.host for member in others})

    def lost_host(self) -> Failure | None:
        """Return the failure of the first rank of the host that counts as lost: the first host that is not on the side
        of most ranks, or of rank 0 in a tie.

        None while all hosts answer. A rank that is not connected to every host does not know the sides: None, too.
        """
        resent = {host: _resent(connection) for host, connection in self._probed().items()}
        here = [member for member in self._members if resent.get(member.host, 0) < RESENT]
        there = [member for member in self._members if resent.get(member.host, 0) >= RESENT]
        if not there or len(resent) < self._num_others:
            return None
        lost = min(here, there, key=lambda side: (len(side), side[0].rank == 0))
        name = lost[0].host
        ranks = [member.rank for member in lost if member.host == name]
        message = f"the connection to host {name} ({rank_range(ranks[0], len(ranks))}) was lost: it does not answer"
        return Failure(ranks[0], message, EXIT_RANK_DIED, problems=(Problem(message),), host=name)

    def _probed(self) -> dict[str, int]:
        """Return a connection of this process to each host, which the kernel probes."""
        if not all(self._leads_to(connection) == host for host, connection in self._connections.items()):
            self._connections = {}
        if len(self._connections) < self._num_others:
            for number in map(int, os.listdir("/proc/self/fd")):
                host = self._leads_to(number)
                if host is not None and host not in self._connections:
                    self._connections[host] = number
                    _probe(number)
        return dict(self._connections)

    def _leads_to(self, descriptor: int) -> str | None:
        """Return the host at the other end of a connection; None if this is no connection to another host."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                return self._host_of.get(connection.getpeername()[0].removeprefix("::ffff:").partition("%")[0])
        return None


def hang_up() -> None:
    """Leave all groups at once: ranks that wait for this one, which has failed, notice it before it exits."""
    from parallelrun.distributed import shared_memory, torch_private

    for group, _ in torch_private.process_groups():
        if shared_memory.is_ours(group):
            group.abort()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _borrowed(int(name)) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # raises if it only listens
                    connection.shutdown(socket.SHUT_RDWR)


def find_loss(
    lost_host: Callable[[], Failure | None], parent: int | None, heartbeats: HeartbeatFile, rank: int
) -> Failure | None:
    """Return the loss of a host or of this rank's launcher, where this rank has come to; None if nothing is lost.

    parent: see `launcher`.
    """
    if parent not in (None, os.getppid()):
        return Failure(rank, LAUNCHER_LOST, EXIT_RANK_DIED).at(heartbeats.read(rank), os.getpid())
    lost = lost_host()
    return lost.at(heartbeats.read(rank), 0) if lost is not None else None


def launcher(attached: Attached, environ: Mapping[str, str]) -> int | None:
    """Return the pid of the launcher with which this process must end; None if there is none.

    Slurm ends its ranks itself. A shell that has set torchrun's variables by hand may have exited long ago.
    """
    by_torchrun = attached.source == "torchrun" and environ.get("TORCHELASTIC_RUN_ID")
    return os.getppid() if by_torchrun or attached.source == "mpirun" else None


def _resent(descriptor: int) -> int:
    """Return how often the kernel has sent the same data or probe over a connection without an answer."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        return max(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)[2:])  # tcpi_retransmits, tcpi_probes
    return 0


def _probe(descriptor: int) -> None:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        for option, value in _PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket of gloo's or torch's, which stays theirs. Raises OSError if the descriptor is no socket."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
