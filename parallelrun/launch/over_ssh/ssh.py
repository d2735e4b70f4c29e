"""Start the ranks of several hosts from one machine over ssh, as horovodrun does: `-np 16 -H server1:4,server2:4`.

Each other host's agent (`launch/over_ssh/ssh_agent.py`) starts ranks with torchrun's variables, and from then on they
are ranks as under torchrun (`launch/entry/attach.py`). torchrun itself always exits with 1, and its ranks outlive it if
it is killed. The user's words never pass a remote shell: they are sent to the agents' stdin."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TextIO

from parallelrun.base.errors import EXIT_RANK_DIED, EnvironmentProblem, Problem
from parallelrun.base.stop_signals import STOP_SIGNALS, handlers
from parallelrun.base.wording import rank_range
from parallelrun.launch.host import interfaces
from parallelrun.launch.host.environment import TOKEN, for_other_hosts
from parallelrun.launch.over_ssh.hosts import HostRanks
from parallelrun.launch.over_ssh.ssh_agent import GRACE_S, MARK, TICK_S, Children, start_ranks, supervise

CONNECT_S = 60.0  # for ssh to connect and the agent to print its address
OTHERS_S = GRACE_S + 5.0  # after a host has ended with a failure: time for the others to notice, to report and to end
END_S = 5.0  # for an agent to end after its stdin was closed
# ssh ends if a host is silent for 2 s, and then does not answer three questions in 6 s
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=2",
        "-o", "ServerAliveCountMax=3")  # fmt: skip
_PORTS = range(20_000, 30_000)  # rank 0 listens on a random one, or one of the seven after it


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh_config: str | None) -> int:
    """Run `parallelrun <words>` on all hosts and return its exit code. No process outlives this call.

    ssh_config: ssh's -F. Raises EnvironmentProblem when a host cannot be reached or has no parallelrun.
    """
    if shutil.which("ssh") is None:
        raise EnvironmentProblem(Problem("ssh is not installed on this host", "-H", command="install openssh-client"))
    signals: list[int] = []
    with handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        agents = [Agent(host, ["-F", ssh_config] if ssh_config else []) for host in hosts if not host.is_here]
        try:
            return supervise(start(hosts, agents, words, signals), signals, OTHERS_S)
        finally:
            for agent in agents:
                agent.kill()
            for agent in agents:
                agent.end()


class Agent(subprocess.Popen[bytes]):
    """An ssh to the agent of another host: signals go to the ranks there. address: of the host, once the agent has
    printed it."""

    stdin: IO[bytes]

    def __init__(self, host: HostRanks, options: list[str]):
        self.host, self._options = host, options
        self.address: str | None = None
        self._complaints: list[str] = []  # stderr before the address: of ssh and the login shell
        command, pipe = remote_command(host.name, options), subprocess.PIPE
        # its own session: Ctrl-C reaches only this process, which forwards it
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        streams = ((self.stdout, sys.stdout), (self.stderr, sys.stderr))
        self.relays = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in streams]
        for relay in self.relays:
            relay.start()

    def _relay(self, source: IO[bytes], target: TextIO) -> None:
        """Show lines of the ranks, each with its host. Lines before the address are of a login shell, or of ssh."""
        for raw in source:
            line = raw.decode(errors="replace").removesuffix("\n")
            if self.address is not None:
                with contextlib.suppress(OSError, ValueError):  # a closed terminal does not end the run
                    target.write(f"[{self.host.name}] {line}\n")
                    target.flush()
            elif MARK in line:
                self.address = line.partition(MARK)[2]
            elif target is sys.stderr and line.strip():
                self._complaints.append(line.strip())

    def send(self, line: str) -> None:
        """Send a line to the agent, unless it has ended."""
        with contextlib.suppress(OSError):
            self.stdin.write(line.encode() + b"\n")
            self.stdin.flush()

    def send_signal(self, sig: int) -> None:
        """Let the agent send a signal to its ranks."""
        self.send(signal.Signals(sig).name)

    def poll(self) -> int | None:
        """Return the exit code of the host, None while its ranks run. Report a lost connection."""
        code = super().poll()
        if code is None or 0 <= code < 255:  # ssh's own if the connection was lost
            return code
        ranks = rank_range(self.host.first_rank, self.host.num_ranks)
        print(f"error: the connection to host {self.host.name} ({ranks}) was lost", file=sys.stderr, flush=True)
        return EXIT_RANK_DIED

    def kill(self) -> None:
        """Close the agent's stdin, which ends it and its ranks."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def end(self) -> None:
        """Wait until ssh has ended and its output is shown; kill it after END_S."""
        try:
            self.wait(END_S)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)
        for relay in self.relays:
            relay.join(END_S)
        self.wait()

    def unreachable(self) -> Problem:
        """Return the reason why this host's agent has not printed its address."""
        why = "; ".join(self._complaints[-3:]) or "no answer"
        words = ["ssh", *self._options, self.host.name.strip("[]"), f"{sys.executable} -m parallelrun doctor"]
        return Problem(f"ssh cannot start parallelrun on {self.host.name}: {why}", "-H", command=shlex.join(words))


def remote_command(name: str, options: list[str]) -> list[str]:
    """Return the command that starts an agent on another host: this Python in this directory, with its search paths."""
    needed = [f"{key}={os.environ[key]}" for key in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(key)]
    agent = shlex.join(["env", *needed, sys.executable, "-m", "parallelrun.launch.over_ssh.ssh_agent"])
    return [*_SSH, *options, name.strip("[]"), f"cd {shlex.quote(str(Path.cwd()))} && exec {agent}"]


def start(
    hosts: Sequence[HostRanks], agents: Sequence[Agent], words: Sequence[str], signals: Sequence[int]
) -> Children:
    """Wait until all hosts are reached, and start their ranks. Return those of this host, and the agents.

    Raises EnvironmentProblem naming the hosts that are not reached; a signal raises KeyboardInterrupt.
    """
    deadline = time.monotonic() + CONNECT_S
    while waiting := [agent for agent in agents if agent.address is None]:
        if signals:
            raise KeyboardInterrupt
        if time.monotonic() > deadline or not any(relay.is_alive() for agent in waiting for relay in agent.relays):
            raise EnvironmentProblem(*(agent.unreachable() for agent in waiting))
        time.sleep(TICK_S)
    places = [f"{rank_range(host.first_rank, host.num_ranks)} on {host.name}" for host in hosts]
    print(f"starting {', '.join(places)}", file=sys.stderr, flush=True)
    addresses = [str(agent.address) for agent in agents]
    leaving = filter(None, map(interfaces.address_towards, addresses))  # addresses from which packets leave this host
    environ = {
        "WORLD_SIZE": str(sum(host.num_ranks for host in hosts)),
        "MASTER_ADDR": next(leaving, os.uname().nodename) if hosts[0].is_here else addresses[0],
        "MASTER_PORT": str(secrets.choice(_PORTS)),
        TOKEN: secrets.token_hex(16),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        **for_other_hosts(os.environ),
    }
    children: Children = {agent.host.first_rank: agent for agent in agents}
    for agent in agents:
        ranks = {"first_rank": agent.host.first_rank, "num_ranks": agent.host.num_ranks}
        agent.send(json.dumps({"words": [*words], **ranks, "environ": environ}))
    for host in hosts:
        if host.is_here:
            children |= start_ranks(words, host.first_rank, host.num_ranks, environ)
    return children
