"""The process on each host of `-np N -H h1:4,h2:4` that starts this host's ranks, forwards signals and ends them.

`cli/host_launcher.py` starts it, over ssh on other hosts, and writes to its stdin: first one line of JSON with the
`Order`, then names of signals. When stdin ends, because the launcher has ended or the connection is lost, the agent
ends its ranks. Only the rendezvous of rank 0 listens on the network, on one address.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from parallelrun.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.launch import processes
from parallelrun.launch.environment import LISTENER, without_launchers
from parallelrun.launch.rank import leave_with_parent

GREETING = "parallelrun host agent: "  # a login shell may print other lines before it
SERVE = "serve"  # argument: this host has rank 0, so open a listening socket
LOCAL = "local"  # argument: this is the launcher's own host
GRACE_S = 10.0  # after a rank has failed: time for the others to notice and report it
_TICK_S = 0.1
_SIOCGIFADDR = 0x8915  # Linux


@dataclass(frozen=True)
class Hello:
    """The greeting of an agent on another host.

    address: this host as the launcher reached it; launcher: the launcher's address as this host sees it, empty if
    unknown; port: where rank 0 will listen, 0 if it runs elsewhere.
    """

    host: str
    address: str
    launcher: str
    port: int


@dataclass(frozen=True)
class Order:
    """The ranks that an agent must start, each as `parallelrun <words>` with the variables `environ`.

    address: this host as the others see it, to choose the network interface; listener: the descriptor of rank 0's
    socket, if the launcher has opened it.
    """

    words: tuple[str, ...]
    first_rank: int
    num_ranks: int
    world: int
    master_addr: str
    master_port: int
    environ: dict[str, str]
    address: str = ""
    listener: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        fields = json.loads(text)
        return cls(**{**fields, "words": tuple(fields["words"])})


def main(arguments: list[str]) -> int:
    """Run an agent: greet, read the order, start the ranks and watch them. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher forwards those that matter
    lines = _Lines()
    listener = None
    if LOCAL not in arguments:
        launcher, address = addresses(os.environ)
        listener = listen(address) if SERVE in arguments else None
        port = listener.getsockname()[1] if listener else 0
        print(GREETING + json.dumps(asdict(Hello(os.uname().nodename, address, launcher, port))), flush=True)
    text = lines.first()
    if text is None:
        return EXIT_OK  # the launcher gave up before it sent an order
    order = Order.from_json(text)
    descriptor = order.listener if listener is None else listener.detach()
    return Ranks(order, descriptor).watch(lines)


def addresses(environ: Mapping[str, str]) -> tuple[str, str]:
    """(the launcher's address as this host sees it, this host's as the launcher sees it), from sshd's variables."""
    client, _, server, _ = environ.get("SSH_CONNECTION", f"- - {os.uname().nodename} -").split()
    return client.strip("-"), server


def listen(address: str) -> socket.socket:
    """A socket for rank 0's rendezvous, on exactly this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def interface_of(address: str) -> str | None:
    """The network interface with the IPv4 `address` (Linux), or None."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found = socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
                if found == address:
                    return name
    return None


class Ranks:
    """The ranks of this host, started by the constructor."""

    def __init__(self, order: Order, listener: int | None):
        self._pids: dict[int, int] = {}  # rank -> process, while it lives
        self._codes: dict[int, int] = {}  # rank -> exit code, in the order in which they ended
        self._ended_by_us = False
        for local_rank in range(order.num_ranks):
            self._pids[order.first_rank + local_rank] = _fork(order, local_rank, listener)
        if listener is not None:
            os.close(listener)

    def watch(self, lines: _Lines) -> int:
        """Wait for all ranks and forward the launcher's signals. Returns the exit code of this host."""
        deadline = float("inf")
        while self._pids:
            for word in lines.read(_TICK_S):
                if word is None:
                    self._end_all()
                else:
                    self._send(signal.Signals[word])
            self._reap()
            if deadline == float("inf") and self._failed():
                deadline = time.monotonic() + GRACE_S
            if time.monotonic() > deadline:
                self._end_all()
        return self._exit_code()

    def _send(self, number: int) -> None:
        for pid in self._pids.values():
            processes.kill(pid, number)

    def _end_all(self) -> None:
        self._ended_by_us = True
        self._send(signal.SIGKILL)

    def _reap(self) -> None:
        for rank, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            processes.kill_group(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            del self._pids[rank]
            if not (self._ended_by_us and code == -signal.SIGKILL):
                self._codes[rank] = code

    def _failed(self) -> bool:
        return any(code != EXIT_OK for code in self._codes.values())

    def _exit_code(self) -> int:
        """The code of rank 0, which knows the cause; else that of the rank that failed first."""
        codes = [code for code in (self._codes.get(0, 0), *self._codes.values()) if code != EXIT_OK]
        if not codes:
            return EXIT_RANK_DIED if self._ended_by_us else EXIT_OK
        return codes[0] if codes[0] > 0 else EXIT_RANK_DIED


def _fork(order: Order, local_rank: int, listener: int | None) -> int:
    """Start one rank by fork, so that it ends with its agent; torch is not loaded yet, so a fork is safe."""
    agent = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        leave_with_parent(agent)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        if listener is not None and order.first_rank + local_rank != 0:
            os.close(listener)
            listener = None
        environ = variables(order, local_rank, os.environ, listener)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = ["parallelrun", *order.words]
        from parallelrun.cli.main import main as program

        code = program(list(order.words))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def variables(order: Order, local_rank: int, host: Mapping[str, str], listener: int | None) -> dict[str, str]:
    """The environment of a rank: this host's, overridden by the launcher's, and torchrun's variables for the rank."""
    found = {**without_launchers(host), **order.environ}
    paths = [path for environ in (order.environ, host) for path in environ.get("PATH", "").split(os.pathsep) if path]
    found["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    if order.address and (interface := interface_of(order.address)):
        found.setdefault("GLOO_SOCKET_IFNAME", interface)
    found.update(
        RANK=str(order.first_rank + local_rank),
        WORLD_SIZE=str(order.world),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(order.num_ranks),
        MASTER_ADDR=order.master_addr,
        MASTER_PORT=str(order.master_port),
    )
    if listener is not None:
        found[LISTENER] = str(listener)
    return found


class _Lines:
    """Reads lines from stdin without buffering, so that `select` sees everything."""

    def __init__(self) -> None:
        self._rest = b""
        self._ended = False

    def first(self) -> str | None:
        """Wait for a complete line; None if stdin ends first."""
        while b"\n" not in self._rest:
            chunk = os.read(0, 65536)
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def read(self, patience_s: float) -> Iterator[str | None]:
        """Yield the lines that arrive within `patience_s`, and None once when stdin ends."""
        if self._ended:
            time.sleep(patience_s)
        elif select.select([0], [], [], patience_s)[0]:
            chunk = os.read(0, 65536)
            self._rest += chunk
            *lines, self._rest = self._rest.split(b"\n")
            yield from (line.decode() for line in lines)
            if not chunk:
                self._ended = True
                yield None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
