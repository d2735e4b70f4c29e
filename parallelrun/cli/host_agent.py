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
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallelrun.cli.host_ranks import Order, Ranks
from parallelrun.cli.unanswered import RESENT, is_unanswered
from parallelrun.errors import EXIT_OK
from parallelrun.launch import guard, processes, stores
from parallelrun.launch.rank import STOP_SIGNALS, end

MARK = "\x1eparallelrun host agent: "  # before each message, among what ranks and a login shell print
LOCAL = "local"  # argument: this is the launcher's own host
_HUNG_UP_S, _UNANSWERED_S = 5.0, 10.0  # without a launcher: time for it to see to the run's status, if it lives
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

    prepare: `{modules, environ}`: what ranks will need; resent: how often the kernel sends the same data again until
    the launcher's host counts as lost; listen: an address, answered by `listening`; start: an `Order`, answered by
    `started`; signal: its name, for the ranks; lost: the `LostHost` that makes the ranks end. Then `run` tells the run
    directory, `exit` how a rank ended that has failed, and `ended` the code of the host when all ranks have ended;
    `alive` needs no answer.
    """

    def __init__(self, is_local: bool):
        self._channel = 0 if is_local else 1
        self._resent = RESENT
        self._over_ssh = not is_local  # SSH_CONNECTION may be there on the launcher's host, too: that of the user
        self._received = b""
        self._hung_up = False
        self._listener: socket.socket | None = None
        self._ranks: Ranks | None = None
        self._told_run: Path | None = None

    def tell(self, what: str, content: Any) -> None:
        """Send a message to the launcher, if there still is one."""
        with contextlib.suppress(OSError):
            os.write(self._channel, f"{MARK}{json.dumps({what: content})}\n".encode())

    def serve(self) -> None:
        """Obey until the launcher hangs up or cannot be reached; then kill the ranks."""
        next_beat, patience_s = 0.0, _HUNG_UP_S
        while not self._hung_up:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_S
                self.tell("alive", None)
                if self._over_ssh and is_unanswered(os.environ, self._resent):
                    self._hung_up, patience_s = True, _UNANSWERED_S
            for line in self._lines():
                ((what, content),) = json.loads(line).items()
                self._obey(what, content)
            self._look()
        directory = self._ranks.notes.run if self._ranks is not None else None
        while self._ranks is not None:
            self._ranks.send(signal.SIGKILL)
            self._look()
            time.sleep(_TICK_S)
        if directory is not None:  # unless the launcher lives, and this host alone was cut off from it
            guard.conclude_abandoned(directory, guard.LAUNCHER_GONE, patience_s)

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
            prepare(content["modules"], content["environ"])
        elif what == "resent":
            self._resent = content
        elif what == "listen":
            self.tell("listening", self._listen(content))
        elif what == "start":
            order = Order(**content)
            self._ranks = Ranks(order, self._listener, lambda one: self.tell("exit", asdict(one)))
            self._listener = self._told_run = None
            self.tell("started", None)
        elif what == "signal" and self._ranks is not None:
            self._ranks.send(signal.Signals[content])
        elif what == "lost" and self._ranks is not None:
            self._ranks.notes.set_lost(content)

    def _listen(self, address: str) -> dict[str, Any]:
        """Open the socket of rank 0. Return its port, or 0 and why there is none."""
        try:
            self._listener = stores.listen(address, 0)
        except OSError as error:
            return {"port": 0, "why": error.strerror or str(error)}
        return {"port": self._listener.getsockname()[1], "why": ""}

    def _look(self) -> None:
        if self._ranks is not None and self._told_run is None and (found := self._ranks.notes.run) is not None:
            self._told_run = found
            self.tell("run", os.fspath(found))
        if self._ranks is not None and self._ranks.have_ended():
            code = self._ranks.exit_code()
            self._ranks.notes.close()
            self._ranks = None
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


if __name__ == "__main__":
    end(main(sys.argv[1:]))
