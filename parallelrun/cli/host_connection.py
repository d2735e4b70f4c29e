"""The launcher's connection to one host's agent (`cli/host_agent.py`), over ssh or a process of this host."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from parallelrun.cli.host_agent import LOCAL, SERVE, Hello
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.errors import EnvironmentProblem, Problem

CONNECT_S = 60.0  # for ssh to connect and the agent to greet
SSH_FAILED = 255
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_AGENT = "parallelrun.cli.host_agent"


@dataclass
class HostConnection:
    """The launcher's connection to one host's agent.

    hello: the greeting of a remote agent, once it has come; complaints: stderr of ssh and the login shell before that.
    """

    ranks: HostRanks
    process: subprocess.Popen[bytes]
    hello: Hello | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.ranks.host.name

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

    def unreachable(self, ssh: SshOptions) -> Problem:
        """The reason why this host's agent did not greet."""
        code = self.process.poll()
        ended = f"no answer in {CONNECT_S:g} s" if code is None else f"exit code {code}"
        why = "; ".join(self.complaints[-3:]) or ended
        how = "cannot be reached by ssh" if code in (None, SSH_FAILED) else "cannot start parallelrun"
        doctor = shlex.join([sys.executable, "-m", "parallelrun", "doctor"])
        test = shlex.join(["ssh", *ssh.words(), self.name.strip("[]"), doctor])
        return Problem(f"{self.name} {how}: {why}", "-H", command=test)


def connect(one: HostRanks, ssh: SshOptions, serves: bool) -> HostConnection:
    """Start the agent of another host. serves: rank 0 runs there."""
    command = [*_SSH, *ssh.words(), one.host.name.strip("[]"), remote_command(serves)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
        )
    except FileNotFoundError as error:
        problem = Problem("ssh is not installed on this host", f"-H {one.host.name}", command="install openssh-client")
        raise EnvironmentProblem(problem) from error
    return HostConnection(one, process)


def start_here(one: HostRanks, listener: socket.socket | None) -> HostConnection:
    """Start the agent of this host, without ssh; its ranks share our terminal."""
    process = subprocess.Popen(
        [sys.executable, "-m", _AGENT, LOCAL],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()] if listener else [],
        start_new_session=True,
    )
    return HostConnection(one, process)


def remote_command(serves: bool) -> str:
    """The command for the login shell of another host: this Python in this directory, with its search paths."""
    needed = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(name)]
    agent = ["env", *needed, sys.executable, "-m", _AGENT, *([SERVE] if serves else [])]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"
