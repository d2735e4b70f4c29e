"""The launcher's connection to the agent of one host (`launch/over_ssh/ssh_agent.py`): an ssh, or a process of this
host.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TextIO

from parallelrun.base.errors import EnvironmentProblem, Problem
from parallelrun.launch.over_ssh.hosts import HostRanks
from parallelrun.launch.over_ssh.ssh_agent import LOCAL, MARK

CONNECT_S = 60.0  # for ssh to connect and the agent to print its address
# ssh ends if a host is silent for 2 s, and then does not answer three questions in 6 s
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=2",
        "-o", "ServerAliveCountMax=3")  # fmt: skip
_AGENT = "parallelrun.launch.over_ssh.ssh_agent"


class SshConnection:
    """address: of the host, once the agent has printed it; empty for this host, whose ranks share our terminal.
    is_closed: `hang_up` was called. LOST: the exit code of ssh if the connection or the agent was lost."""

    LOST = 255

    def __init__(self, host: HostRanks, ssh_config: str | None):
        self.host, self._options = host, ["-F", ssh_config] if ssh_config else []
        self.address, self.is_closed = "" if host.is_here else None, False
        self._complaints: list[str] = []  # stderr before the address: of ssh and the login shell
        command = [sys.executable, "-m", _AGENT, LOCAL] if host.is_here else remote_command(host.name, self._options)
        pipe, output = subprocess.PIPE, None if host.is_here else subprocess.PIPE
        try:  # its own session: Ctrl-C reaches only this process, which forwards it
            self.process = subprocess.Popen(command, stdin=pipe, stdout=output, stderr=output, start_new_session=True)
        except FileNotFoundError as error:
            problem = Problem("ssh is not installed on this host", f"-H {host.name}", command="install openssh-client")
            raise EnvironmentProblem(problem) from error
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self._relays = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in streams if pair[0]]
        for thread in self._relays:
            thread.start()

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
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hang_up(self) -> None:
        """Close the agent's stdin, which ends it and its ranks."""
        self.is_closed = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait until the agent has ended and its output is shown; kill it after the deadline."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        for thread in self._relays:
            thread.join(max(0.0, deadline - time.monotonic()))

    def unreachable(self) -> Problem:
        """Return the reason why this host's agent has not printed its address."""
        code = self.process.poll()
        if code is not None:
            self.end(time.monotonic() + 1.0)  # its last words
        ended = f"no answer in {CONNECT_S:g} s" if code is None else f"exit code {code}"
        why = "; ".join(self._complaints[-3:]) or ended
        doctor = shlex.join([sys.executable, "-m", "parallelrun", "doctor"])
        test = shlex.join(["ssh", *self._options, self.host.name.strip("[]"), doctor])
        return Problem(f"ssh cannot start parallelrun on {self.host.name}: {why}", "-H", command=test)


def remote_command(name: str, options: list[str]) -> list[str]:
    """Return the command that starts an agent on another host: this Python in this directory, with its search paths."""
    needed = [f"{key}={os.environ[key]}" for key in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(key)]
    agent = shlex.join(["env", *needed, sys.executable, "-m", _AGENT])
    return [*_SSH, *options, name.strip("[]"), f"cd {shlex.quote(str(Path.cwd()))} && exec {agent}"]
