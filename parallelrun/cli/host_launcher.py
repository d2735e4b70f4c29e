"""Start the ranks of several hosts from one machine over ssh, as horovodrun does: `-np 16 -H server1:4,server2:4`.

One ssh connection per host carries the order and signals to the host's agent (`cli/host_agent.py`), and its ranks'
output back. The user's words never pass a remote shell: they are sent as JSON to the agent's stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from parallelrun.cli import host_agent, host_connection
from parallelrun.cli.host_agent import GREETING, Hello, Order
from parallelrun.cli.host_connection import CONNECT_S, SSH_FAILED, HostConnection
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RANK_DIED,
    EXIT_TERMINATED,
    EnvironmentProblem,
    Problem,
)
from parallelrun.launch.environment import for_other_hosts

GRACE_S = host_agent.GRACE_S + 5.0  # after a host has failed: time for the others to notice and to end
INTERRUPT_S = 5.0  # after Ctrl-C: time to unwind
END_S = 5.0  # after the stdin of the agents was closed
_TICK_S = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the ranks finish their step, save and exit


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions) -> int:
    """Run `parallelrun <words>` on all hosts and return its exit code. No process outlives this call.

    Raises EnvironmentProblem when a host cannot be reached or has no parallelrun.
    """
    launcher = HostLauncher(hosts, words, ssh)
    with launcher.signals():
        try:
            launcher.start()
            return launcher.watch()
        finally:
            launcher.end_all()


class HostLauncher:
    """The state of one start over several hosts."""

    def __init__(self, hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions):
        self._hosts = hosts
        self._words = tuple(words)
        self._ssh = ssh
        self._world = sum(one.num_ranks for one in hosts)
        self._agents: list[HostConnection] = []
        self._signals: list[int] = []
        self._forwarded = 0
        self._deadline = float("inf")
        self._codes: dict[str, int] = {}  # by host, in the order in which they ended
        self._ended_by_us: set[str] = set()  # hosts whose exit codes do not tell the cause
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[int, bytes] = {}  # by descriptor: output without a newline so far

    def start(self) -> None:
        """Connect to all hosts, decide where rank 0 listens, and order every agent to start its ranks."""
        first = self._hosts[0]
        for one in self._hosts:
            if not one.host.is_this_one:
                self._agents.append(self._watched(host_connection.connect(one, self._ssh, serves=one is first)))
        self._await_hellos()
        listener = None
        if first.host.is_this_one:
            listener, address = self._listen_here()
            port = listener.getsockname()[1]
        else:
            hello = self._agents[0].hello
            assert hello is not None
            address, port = hello.address, hello.port
        self._check_address(address)
        self._agents += [host_connection.start_here(one, listener) for one in self._hosts if one.host.is_this_one]
        where = ", ".join(f"{agent.ranks.ranks} on {agent.name}" for agent in self._agents)
        print(f"starting {where}", file=sys.stderr, flush=True)
        for agent in self._agents:
            agent.send(self._order(agent, address, port, listener).to_json())
        if listener is not None:
            listener.close()

    def watch(self) -> int:
        """Forward output and signals until all hosts have ended. Returns the run's exit code."""
        while len(self._codes) < len(self._agents):
            self._relay(_TICK_S)
            self._pass_signals()
            for agent in self._agents:
                self._look_at(agent)
            if time.monotonic() > self._deadline:
                self.end_all()
        while self._selector.get_map():
            self._relay(0)
        return self._exit_code()

    def end_all(self) -> None:
        """End all agents that still run: their ranks end with them."""
        self._ended_by_us |= {agent.name for agent in self._agents if agent.process.poll() is None}
        for agent in self._agents:
            agent.hang_up()
        deadline = time.monotonic() + END_S
        for agent in self._agents:
            while agent.process.poll() is None and time.monotonic() < deadline:
                self._relay(0.05)
            agent.process.kill()
            agent.process.wait()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Collect signals; ignored signals (nohup) stay ignored."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = [n for n in (signal.SIGINT, *_FORWARDED) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watched(self, agent: HostConnection) -> HostConnection:
        for stream in (agent.process.stdout, agent.process.stderr):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, agent)
        return agent

    def _order(self, agent: HostConnection, address: str, port: int, listener: socket.socket | None) -> Order:
        return Order(
            words=self._words,
            first_rank=agent.ranks.first_rank,
            num_ranks=agent.ranks.num_ranks,
            world=self._world,
            master_addr=address,
            master_port=port,
            environ=for_other_hosts(os.environ),
            address=agent.hello.address if agent.hello else self._own_address(),
            listener=listener.fileno() if listener and not agent.hello else None,
        )

    def _own_address(self) -> str:
        """This host's address as the other hosts see it."""
        seen = (agent.hello.launcher for agent in self._agents if agent.hello)
        return next(filter(None, seen), os.uname().nodename)

    def _listen_here(self) -> tuple[socket.socket, str]:
        address = self._own_address()
        try:
            return host_agent.listen(address), address
        except OSError as error:
            what = f"rank 0 cannot listen on {address}, this host's address for the others: {error.strerror}"
            fix = "start from a host in the same network, or name another host first in -H"
            raise EnvironmentProblem(Problem(what, "-H", command=fix)) from error

    def _check_address(self, address: str) -> None:
        """Refuse an address of rank 0 that means another host elsewhere."""
        hosts = {agent.hello.host for agent in self._agents if agent.hello}
        hosts |= {os.uname().nodename for one in self._hosts if one.host.is_this_one}
        if len(hosts) > 1 and (address.startswith("127.") or address == "::1"):
            what = f"rank 0 would listen on {address}, which the other hosts cannot reach"
            raise EnvironmentProblem(Problem(what, "-H", "name the first host as the network knows it"))

    def _await_hellos(self) -> None:
        """Wait until all agents have greeted. Raises EnvironmentProblem naming every host that has not."""
        deadline = time.monotonic() + CONNECT_S
        while waiting := [agent for agent in self._agents if agent.hello is None]:
            ended = all(agent.process.poll() is not None for agent in waiting)
            self._relay(0 if ended else _TICK_S)
            if self._signals:
                raise KeyboardInterrupt
            if ended or time.monotonic() > deadline:
                raise EnvironmentProblem(*(agent.unreachable(self._ssh) for agent in waiting))

    def _relay(self, patience_s: float) -> None:
        """Show the hosts' output, each line with its host."""
        for key, _ in self._selector.select(patience_s):
            chunk = os.read(key.fd, 65536)
            *lines, rest = (self._unfinished.pop(key.fd, b"") + chunk).split(b"\n")
            if chunk:
                self._unfinished[key.fd] = rest
            else:
                self._selector.unregister(key.fileobj)
                lines += [rest] if rest else []
            for line in lines:
                self._show(key.data, key.fileobj is key.data.process.stderr, line.decode(errors="replace"))

    def _show(self, agent: HostConnection, is_error: bool, line: str) -> None:
        if agent.hello is None and line.startswith(GREETING):
            agent.hello = Hello(**json.loads(line.removeprefix(GREETING)))
            return
        if agent.hello is None:  # from the login shell, or the reason why the agent cannot start
            agent.complaints += [line.strip()] if is_error and line.strip() else []
            return
        stream: IO[str] = sys.stderr if is_error else sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a closed terminal does not end the run
            stream.write(f"[{agent.name}] {line}\n")
            stream.flush()

    def _pass_signals(self) -> None:
        """Forward signals. The first Ctrl-C unwinds; the first SIGTERM ends after a step and a save; a second kills."""
        for number in self._signals[self._forwarded :]:
            self._forwarded += 1
            if self._forwarded > 1:
                self._deadline = 0.0
            elif number == signal.SIGINT:
                self._deadline = time.monotonic() + INTERRUPT_S
            for agent in self._agents:
                agent.send(signal.Signals(number).name)

    def _look_at(self, agent: HostConnection) -> None:
        code = agent.process.poll()
        if code is None or agent.name in self._codes:
            return
        self._codes[agent.name] = code
        if code == EXIT_OK:
            return
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        if code == SSH_FAILED and agent.hello:
            self._codes[agent.name] = EXIT_RANK_DIED
            print(f"error: lost the connection to {agent.name} ({agent.ranks.ranks})", file=sys.stderr, flush=True)

    def _exit_code(self) -> int:
        """The signal's code, else that of the first host (rank 0 knows the cause), else of the first failed host."""
        if self._signals and (signal.SIGINT in self._signals or len(self._signals) > 1):
            return EXIT_INTERRUPTED if signal.SIGINT in self._signals else EXIT_TERMINATED
        own = {name: code for name, code in self._codes.items() if name not in self._ended_by_us} or self._codes
        ordered = [own[name] for name in (self._hosts[0].host.name, *own) if name in own]
        failed = [code for code in ordered if code not in (EXIT_OK, EXIT_PREEMPTED)]
        code = failed[0] if failed else max(ordered)
        return code if code >= 0 else EXIT_RANK_DIED
