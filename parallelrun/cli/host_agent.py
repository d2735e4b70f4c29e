"""The process on each host of `-np N -H h1:4,h2:4` that starts this host's ranks, forwards signals and ends them.

`cli/host_launcher.py` starts it, over ssh on other hosts, and writes to its stdin: first one line of JSON with the
`Order`, then names of signals. When stdin ends, because the launcher has ended or the connection is lost, the agent
ends its ranks. Only the rendezvous of rank 0 listens on the network, on one address.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from queue import SimpleQueue

from parallelrun.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.launch import processes, stores
from parallelrun.launch.environment import LISTENER, without_launchers
from parallelrun.launch.rank import STOP_SIGNALS, end

GREETING = "parallelrun host agent: "  # a login shell may print other lines before it
SERVE = "serve"  # argument: this host has rank 0, so open a listening socket
LOCAL = "local"  # argument: this is the launcher's own host
GRACE_S = 10.0  # after a rank has failed: time for the others to notice and report it
_TICK_S = 0.1


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

    environ: the launcher's and those of torchrun that the ranks of a host share; listener: the descriptor of rank 0's
    socket, if the launcher has opened it.
    """

    words: list[str]
    first_rank: int
    num_ranks: int
    environ: dict[str, str]
    listener: int | None = None


def main(arguments: list[str]) -> int:
    """Run an agent: greet, read the order, start the ranks and watch them. Returns the exit code."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # the launcher forwards those that matter
    listener = None
    if LOCAL not in arguments:
        launcher, address = addresses(os.environ)
        listener = stores.listen(address, 0) if SERVE in arguments else None
        port = listener.getsockname()[1] if listener else 0
        print(GREETING + json.dumps(asdict(Hello(os.uname().nodename, address, launcher, port))), flush=True)
    text = sys.stdin.readline()
    if not text.endswith("\n"):
        return EXIT_OK  # the launcher gave up before it sent an order
    order = Order(**json.loads(text))
    ranks = Ranks(order, order.listener if listener is None else listener.detach())
    signals: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_receive, args=(signals,), daemon=True).start()
    return ranks.watch(signals)


def _receive(signals: SimpleQueue[str]) -> None:
    """Take names of signals from the launcher. Its end, or that of the connection, means SIGKILL."""
    for line in sys.stdin:
        signals.put(line.strip())
    signals.put("SIGKILL")


def addresses(environ: Mapping[str, str]) -> tuple[str, str]:
    """(the launcher's address as this host sees it, this host's as the launcher sees it), from sshd's variables."""
    client, _, server, _ = environ.get("SSH_CONNECTION", f"- - {os.uname().nodename} -").split()
    return client.strip("-"), server


class Ranks:
    """The ranks of this host, started by the constructor. torch is not loaded yet, so a fork is safe."""

    def __init__(self, order: Order, listener: int | None):
        start = [partial(_run, order, local_rank, listener) for local_rank in range(order.num_ranks)]
        self._pids = {order.first_rank + i: processes.fork(run) for i, run in enumerate(start)}  # while they live
        self._codes: dict[int, int] = {}  # rank -> exit code, in the order in which they ended
        self._ended_by_us = False
        if listener is not None:
            os.close(listener)

    def watch(self, signals: SimpleQueue[str]) -> int:
        """Wait for all ranks and forward the launcher's signals. Returns the exit code of this host."""
        deadline = float("inf")
        while self._pids:
            with contextlib.suppress(queue.Empty):
                self._send(signal.Signals[signals.get(timeout=_TICK_S)])
            self._reap()
            if deadline == float("inf") and any(code != EXIT_OK for code in self._codes.values()):
                deadline = time.monotonic() + GRACE_S
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
        return self._exit_code()

    def _send(self, number: int) -> None:
        self._ended_by_us |= number == signal.SIGKILL
        for pid in self._pids.values():
            processes.kill(pid, number)

    def _reap(self) -> None:
        for rank, pid in list(self._pids.items()):
            code = processes.reap(pid)
            if code is not None:
                del self._pids[rank]
            if code is not None and not (self._ended_by_us and code == -signal.SIGKILL):
                self._codes[rank] = code

    def _exit_code(self) -> int:
        """The code of rank 0, which knows the cause; else that of the rank that failed first."""
        codes = [code for code in (self._codes.get(0, 0), *self._codes.values()) if code != EXIT_OK]
        if not codes:
            return EXIT_RANK_DIED if self._ended_by_us else EXIT_OK
        return codes[0] if codes[0] > 0 else EXIT_RANK_DIED


def _run(order: Order, local_rank: int, listener: int | None) -> int:
    """As the process of one rank: run the program with torchrun's variables."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.unblock_signals()
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

    return program(order.words)


def variables(order: Order, local_rank: int, host: Mapping[str, str], listener: int | None) -> dict[str, str]:
    """The environment of a rank: this host's, overridden by the order's, and torchrun's variables for the rank."""
    found = {**without_launchers(host), **order.environ}
    paths = [path for environ in (order.environ, host) for path in environ.get("PATH", "").split(os.pathsep) if path]
    found["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    found.update(RANK=str(order.first_rank + local_rank), LOCAL_RANK=str(local_rank))
    if listener is not None:
        found[LISTENER] = str(listener)
    return found


if __name__ == "__main__":
    end(main(sys.argv[1:]))  # a thread still reads stdin
