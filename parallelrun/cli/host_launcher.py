"""Start the ranks of several hosts from one machine over ssh, as horovodrun does: `-np 16 -H server1:4,server2:4`.

One ssh connection per host carries the order and signals to the host's agent (`cli/host_agent.py`), and its ranks'
output back. The user's words never pass a remote shell: they are sent as JSON to the agent's stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, TextIO

from parallelrun.cli.host_agent import GRACE_S as AGENT_GRACE_S
from parallelrun.cli.host_agent import GREETING, LOCAL, SERVE, Hello, Order
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
from parallelrun.launch import stores
from parallelrun.launch.environment import TOKEN, for_other_hosts
from parallelrun.launch.rank import STOP_SIGNALS
from parallelrun.launch.supervisor import signal_handlers

CONNECT_S = 60.0  # for ssh to connect and the agent to greet
GRACE_S = AGENT_GRACE_S + 5.0  # after a host has failed: time for the others to notice and to end
INTERRUPT_S = 5.0  # after Ctrl-C: time to unwind
END_S = 5.0  # after the stdin of the agents was closed
SSH_FAILED = 255
_TICK_S = 0.1
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_AGENT = "parallelrun.cli.host_agent"


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions) -> int:
    """Run `parallelrun <words>` on all hosts and return its exit code. No process outlives this call.

    Raises EnvironmentProblem when a host cannot be reached or has no parallelrun.
    """
    signals: list[int] = []
    with signal_handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        return HostLauncher(hosts, words, ssh, signals).run()


class HostConnection:
    """The launcher's connection to one host's agent, over ssh or to a process of this host.

    hello: the greeting of a remote agent, once it has come; complaints: stderr of ssh and the login shell before that.
    """

    def __init__(self, ranks: HostRanks, ssh: SshOptions, serves: bool, listener: socket.socket | None = None):
        """Start the agent. serves: rank 0 runs there; listener: its socket, which an agent of this host inherits."""
        self.ranks, self.name = ranks, ranks.name
        self.hello: Hello | None = None
        self.complaints: list[str] = []
        output = None if ranks.is_here else subprocess.PIPE  # the ranks of this host share our terminal
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _AGENT, LOCAL] if ranks.is_here else remote_command(ranks.name, ssh, serves),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()] if listener else [],
                start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
            )
        except FileNotFoundError as error:
            problem = Problem("ssh is not installed on this host", f"-H {self.name}", command="install openssh-client")
            raise EnvironmentProblem(problem) from error
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._relays = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in streams if pair[0]]
        for thread in self._relays:
            thread.start()

    def _relay(self, source: IO[bytes], target: TextIO) -> None:
        """Show the host's output, each line with its host. A login shell may print lines before the greeting."""
        for raw in source:
            line = raw.decode(errors="replace").removesuffix("\n")
            if self.hello is not None:
                with contextlib.suppress(OSError, ValueError):  # a closed terminal does not end the run
                    target.write(f"[{self.name}] {line}\n")
                    target.flush()
            elif line.startswith(GREETING):
                self.hello = Hello(**json.loads(line.removeprefix(GREETING)))
            elif source is self.process.stderr and line.strip():
                self.complaints.append(line.strip())

    def send(self, line: str) -> None:
        """Write a line to the agent, unless it has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close the agent's stdin, which makes it end its ranks and itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def show_rest(self) -> None:
        """Wait until the output of an agent that has ended is shown."""
        for thread in self._relays:
            thread.join(END_S)

    def unreachable(self, ssh: SshOptions) -> Problem:
        """The reason why this host's agent did not greet."""
        code = self.process.poll()
        if code is not None:
            self.show_rest()
        ended = f"no answer in {CONNECT_S:g} s" if code is None else f"exit code {code}"
        why = "; ".join(self.complaints[-3:]) or ended
        how = "cannot be reached by ssh" if code in (None, SSH_FAILED) else "cannot start parallelrun"
        doctor = shlex.join([sys.executable, "-m", "parallelrun", "doctor"])
        test = shlex.join(["ssh", *ssh.words(), self.name.strip("[]"), doctor])
        return Problem(f"{self.name} {how}: {why}", "-H", command=test)


def remote_command(name: str, ssh: SshOptions, serves: bool) -> list[str]:
    """The command that starts an agent on another host: this Python in this directory, with its search paths."""
    needed = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(name)]
    agent = ["env", *needed, sys.executable, "-m", _AGENT, *([SERVE] if serves else [])]
    for_login_shell = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"
    return [*_SSH, *ssh.words(), name.strip("[]"), for_login_shell]


def await_hellos(agents: Sequence[HostConnection], signals: Sequence[int], timeout_s: float) -> list[HostConnection]:
    """Wait until all agents on other hosts have greeted. Return those that have not. A signal raises
    KeyboardInterrupt."""
    deadline = time.monotonic() + timeout_s
    while waiting := [agent for agent in agents if agent.hello is None]:
        if signals:
            raise KeyboardInterrupt
        if time.monotonic() > deadline or all(agent.process.poll() is not None for agent in waiting):
            break
        time.sleep(_TICK_S)
    return waiting


class HostLauncher:
    """The state of one start over several hosts.

    signals: gets those that arrive; more: variables for all ranks.
    """

    def __init__(
        self, hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions,
        signals: list[int] | None = None, more: Mapping[str, str] | None = None,
    ):  # fmt: skip
        self._hosts = [one for one in hosts if one.num_ranks]
        self._words = list(words)
        self._ssh = ssh
        self._agents: list[HostConnection] = []
        self.signals = [] if signals is None else signals
        self._more = dict(more or {})
        self._forwarded = 0
        self._deadline = float("inf")
        self._codes: dict[str, int] = {}  # by host, in the order in which they ended
        self._ended_by_us: set[str] = set()  # hosts whose exit codes do not tell the cause

    def run(self) -> int:
        """Start the ranks, and wait until all have ended. Return the exit code. No process outlives this call."""
        try:
            self.start()
            return self.watch()
        finally:
            self.end_all()

    def start(self) -> None:
        """Connect to all hosts, decide where rank 0 listens, and order every agent to start its ranks."""
        first = self._hosts[0]
        for one in self._hosts:
            if not one.is_here:
                self._agents.append(HostConnection(one, self._ssh, serves=one is first))
        self._await_hellos()
        hellos = {agent.name: agent.hello for agent in self._agents if agent.hello}
        own_address = next((hello.launcher for hello in hellos.values() if hello.launcher), os.uname().nodename)
        listener = _listen_here(own_address) if first.is_here else None
        address = own_address if listener else hellos[first.name].address
        port = listener.getsockname()[1] if listener else hellos[first.name].port
        names = {hello.host for hello in hellos.values()}
        names |= {os.uname().nodename for one in self._hosts if one.is_here}
        if len(names) > 1 and (address.startswith("127.") or address == "::1"):
            what = f"rank 0 would listen on {address}, which the other hosts cannot reach"
            raise EnvironmentProblem(Problem(what, "-H", "name the first host as the network knows it"))
        self._agents += [HostConnection(one, self._ssh, False, listener) for one in self._hosts if one.is_here]
        where = ", ".join(f"{agent.ranks.ranks} on {agent.name}" for agent in self._agents)
        print(f"starting {where}", file=sys.stderr, flush=True)
        world = sum(one.num_ranks for one in self._hosts)
        environ = {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        environ |= {
            TOKEN: secrets.token_hex(16),
            **for_other_hosts(os.environ),
            **self._more,
        }  # sent through ssh, on no command line
        for agent in self._agents:
            order = Order(
                words=self._words,
                first_rank=agent.ranks.first_rank,
                num_ranks=agent.ranks.num_ranks,
                environ={**environ, "LOCAL_WORLD_SIZE": str(agent.ranks.num_ranks)},
                listener=listener.fileno() if listener and not agent.hello else None,
            )
            agent.send(json.dumps(asdict(order)))
        if listener is not None:
            listener.close()

    def watch(self) -> int:
        """Forward signals until all hosts have ended. Returns the run's exit code."""
        while len(self._codes) < len(self._agents):
            time.sleep(_TICK_S)
            self._pass_signals()
            for agent in self._agents:
                self._look_at(agent)
            if time.monotonic() > self._deadline:
                self.end_all()
        for agent in self._agents:
            agent.show_rest()
        return self._exit_code()

    def end_all(self) -> None:
        """End all agents that still run: their ranks end with them."""
        self._ended_by_us |= {agent.name for agent in self._agents if agent.process.poll() is None}
        for agent in self._agents:
            agent.hang_up()
        deadline = time.monotonic() + END_S
        for agent in self._agents:
            while agent.process.poll() is None and time.monotonic() < deadline:
                time.sleep(_TICK_S)
            agent.process.kill()
            agent.process.wait()

    def _await_hellos(self) -> None:
        """Wait until all agents have greeted. Raises EnvironmentProblem naming every host that has not."""
        if silent := await_hellos(self._agents, self.signals, CONNECT_S):
            raise EnvironmentProblem(*(agent.unreachable(self._ssh) for agent in silent))

    def _pass_signals(self) -> None:
        """Forward signals. The first Ctrl-C unwinds; the first SIGTERM ends after a step and a save; a second kills."""
        for number in self.signals[self._forwarded :]:
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
        if self.signals and (signal.SIGINT in self.signals or len(self.signals) > 1):
            return EXIT_INTERRUPTED if signal.SIGINT in self.signals else EXIT_TERMINATED
        own = {name: code for name, code in self._codes.items() if name not in self._ended_by_us} or self._codes
        ordered = [own[name] for name in (self._hosts[0].name, *own) if name in own]
        failed = [code for code in ordered if code not in (EXIT_OK, EXIT_PREEMPTED)]
        code = failed[0] if failed else max(ordered)
        return code if code >= 0 else EXIT_RANK_DIED


def _listen_here(address: str) -> socket.socket:
    try:
        return stores.listen(address, 0)
    except OSError as error:
        what = f"rank 0 cannot listen on {address}, this host's address for the others: {error.strerror}"
        fix = "start from a host in the same network, or name another host first in -H"
        raise EnvironmentProblem(Problem(what, "-H", command=fix)) from error
