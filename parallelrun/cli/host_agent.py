"""The process on each host of `-np N -H h1:4,h2:4` that starts this host's ranks, forwards signals and ends them.

`cli/host_connection.py` starts it, over ssh on other hosts, and writes lines of JSON to its stdin: see `Agent`. The
agent answers on its stdout, or on the socket that is its stdin if it is on the launcher's host. It stays between the
attempts of a run, and forks the ranks of each from what it has imported once. When stdin ends, because the launcher has
ended or the connection is lost, it ends its ranks. Only the rendezvous of rank 0 listens on the network, on one
address.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from parallelrun.cli.host_memory import AgentMemory
from parallelrun.cli.unanswered import RESENT, is_unanswered
from parallelrun.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.launch import processes, stores
from parallelrun.launch.environment import LISTENER, without_launchers
from parallelrun.launch.host_failures import Exit
from parallelrun.launch.rank import STOP_SIGNALS, end

MARK = "\x1eparallelrun host agent: "  # before each message, among what ranks and a login shell print
LOCAL = "local"  # argument: this is the launcher's own host
GRACE_S = 10.0  # after a rank has failed: time for the others to notice and report it
BEAT_S = 0.5  # between messages of agent and launcher that only the kernel answers: see `cli/unanswered.py`
_TICK_S = 0.05


@dataclass(frozen=True)
class Hello:
    """The first message of an agent, whose process is `pid`.

    address: this host as the launcher reached it; launcher: the launcher's address as this host sees it, empty if
    unknown or if this is the launcher's host.
    """

    pid: int
    host: str
    address: str
    launcher: str


@dataclass(frozen=True)
class Order:
    """The ranks that an agent must start, each as `parallelrun <words>` with the variables `environ`: the launcher's,
    and those of torchrun that the ranks of a host share."""

    words: list[str]
    first_rank: int
    num_ranks: int
    environ: dict[str, str]


def main(arguments: list[str]) -> int:
    """Run an agent until the launcher hangs up."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)  # the launcher forwards those that matter
    is_local = LOCAL in arguments
    launcher, address = ("", "") if is_local else addresses(os.environ)
    agent = Agent(is_local)
    agent.tell("hello", asdict(Hello(os.getpid(), os.uname().nodename, address, launcher)))
    agent.serve()
    return EXIT_OK


def addresses(environ: Mapping[str, str]) -> tuple[str, str]:
    """(the launcher's address as this host sees it, this host's as the launcher sees it), from sshd's variables."""
    client, _, server, _ = environ.get("SSH_CONNECTION", f"- - {os.uname().nodename} -").split()
    return client.strip("-"), server


class Agent:
    """What the launcher asks for, each as a JSON object with one key, and what the agent tells.

    prepare: `{modules, environ, memory}`: what ranks will need, and whether they keep checkpoints in memory; keep: the
    step and the index of the one from which they go on, or nothing; copy: the step of one and a directory on the disk
    for its files, answered by `copied`; resent: how often the kernel sends the same data again until the launcher's
    host counts as lost; listen: an address, answered by `listening`; start: an `Order`, answered by `started`; signal:
    its name, for the ranks. Then `exit` tells how a rank ended that has failed, `held` which checkpoints this host's
    memory holds, and `ended` the code of the host when all ranks have ended; `alive` needs no answer.
    """

    def __init__(self, is_local: bool):
        self._channel = 0 if is_local else 1
        self._resent = RESENT
        self._over_ssh = not is_local  # SSH_CONNECTION may be there on the launcher's host, too: that of the user
        self._received = b""
        self._hung_up = False
        self._listener: socket.socket | None = None
        self._ranks: Ranks | None = None
        self._memory = AgentMemory()

    def tell(self, what: str, content: Any) -> None:
        """Send a message to the launcher, if there still is one."""
        with contextlib.suppress(OSError):
            os.write(self._channel, f"{MARK}{json.dumps({what: content})}\n".encode())

    def serve(self) -> None:
        """Obey until the launcher hangs up or cannot be reached; then kill the ranks."""
        with self._memory:
            self._serve()

    def _serve(self) -> None:
        next_beat = 0.0
        while not self._hung_up:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self.tell("alive", None)
                self._hung_up = self._over_ssh and is_unanswered(os.environ, self._resent)
            for line in self._lines():
                ((what, content),) = json.loads(line).items()
                self._obey(what, content)
            self._look()
        while self._ranks is not None:
            self._ranks.send(signal.SIGKILL)
            self._look()
            time.sleep(_TICK_S)

    def _lines(self) -> list[bytes]:
        """Return the lines that have come, after _TICK_S at most."""
        if not select.select([0], [], [], _TICK_S)[0]:
            return []
        found = os.read(0, 2**16)
        self._hung_up = not found
        *lines, self._received = (self._received + found).split(b"\n")
        return lines

    def _obey(self, what: str, content: Any) -> None:
        if what == "prepare":
            self._memory.open(content["memory"])
            prepare(content["modules"], content["environ"])
        elif what == "resent":
            self._resent = content
        elif what == "keep":
            self._memory.keep(content)
        elif what == "copy":
            self.tell("copied", self._memory.copy(*content))
        elif what == "listen":
            self.tell("listening", self._listen(content))
        elif what == "start":
            order = Order(**content)
            order.environ.update(self._memory.variables())
            self._ranks = Ranks(order, self._listener, lambda one: self.tell("exit", asdict(one)))
            self._listener = None
            self.tell("started", None)
        elif what == "signal" and self._ranks is not None:
            self._ranks.send(signal.Signals[content])

    def _listen(self, address: str) -> dict[str, Any]:
        """Open the socket of rank 0. Return its port, or 0 and why there is none."""
        try:
            self._listener = stores.listen(address, 0)
        except OSError as error:
            return {"port": 0, "why": error.strerror or str(error)}
        return {"port": self._listener.getsockname()[1], "why": ""}

    def _look(self) -> None:
        if self._ranks is not None and self._ranks.have_ended():
            code, self._ranks = self._ranks.exit_code(), None
            self.tell("held", self._memory.held())
            self.tell("ended", code)


def prepare(modules: Sequence[str], environ: Mapping[str, str]) -> None:
    """Import what the ranks will need, with the variables that native libraries read when they are loaded."""
    os.environ.update(environ)
    with _ends_with_launcher():
        processes.import_all(modules)


@contextlib.contextmanager
def _ends_with_launcher() -> Iterator[None]:
    """End this process at once if the launcher hangs up meanwhile. The thread has ended afterwards: ranks are forked.

    sshd gives a socket or a pipe as stdin: their ends differ.
    """
    done = threading.Event()
    poll = select.poll()
    poll.register(0, getattr(select, "POLLRDHUP", 0))

    def watch() -> None:
        while not done.wait(2 * _TICK_S):
            if poll.poll(0):
                os._exit(EXIT_OK)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Ranks:
    """The ranks of this host, started by the constructor. torch has not been used yet, so a fork is safe.

    told: gets the end of each rank that has failed.
    """

    def __init__(self, order: Order, listener: socket.socket | None, told: Callable[[Exit], None] | None = None):
        start = [partial(_run, order, local_rank, listener) for local_rank in range(order.num_ranks)]
        self._memory_kills = processes.oom_kills()
        self._pids = {order.first_rank + i: processes.fork(run) for i, run in enumerate(start)}  # while they live
        self._codes: dict[int, int] = {}  # rank -> exit code, in the order in which they ended
        self._ended_by_us = False
        self._deadline = float("inf")
        self._told = told
        if listener is not None:
            listener.close()

    def watch(self, signals: SimpleQueue[str]) -> int:
        """Wait for all ranks and forward the signals. Return the exit code of this host."""
        while not self.have_ended():
            with contextlib.suppress(queue.Empty):
                self.send(signal.Signals[signals.get(timeout=_TICK_S)])
        return self.exit_code()

    def have_ended(self) -> bool:
        """Look after the ranks; return whether all have ended. GRACE_S after the first has failed they are killed."""
        self._reap()
        if self._deadline == float("inf") and any(code != EXIT_OK for code in self._codes.values()):
            self._deadline = time.monotonic() + GRACE_S
        if self._pids and time.monotonic() > self._deadline:
            self.send(signal.SIGKILL)
        return not self._pids

    def send(self, number: int) -> None:
        """Send a signal to all ranks that live."""
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
                if code != EXIT_OK and self._told is not None:
                    self._told(Exit(rank, code, processes.oom_kills() > self._memory_kills))

    def exit_code(self) -> int:
        """The code of rank 0, which knows the cause; else that of the rank that failed first."""
        codes = [code for code in (self._codes.get(0, 0), *self._codes.values()) if code != EXIT_OK]
        if not codes:
            return EXIT_RANK_DIED if self._ended_by_us else EXIT_OK
        return codes[0] if codes[0] > 0 else EXIT_RANK_DIED


def _run(order: Order, local_rank: int, listener: socket.socket | None) -> int:
    """As the process of one rank: run the program with torchrun's variables."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.unblock_signals()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    descriptor = None
    if listener is not None and order.first_rank + local_rank == 0:
        descriptor = listener.detach()
    elif listener is not None:
        listener.close()
    environ = variables(order, local_rank, os.environ, descriptor)
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
    end(main(sys.argv[1:]))
