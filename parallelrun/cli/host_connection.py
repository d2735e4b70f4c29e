"""The launcher's connections to the agents of all hosts (`cli/host_agent.py`): an ssh for each, while a run lasts.

A connection carries orders to the agent, and its messages and the ranks' output back. The user's words never pass a
remote shell: they are sent as JSON to the agent's stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TextIO

from parallelrun.cli.host_agent import BEAT_S, LOCAL, MARK, Hello
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.cli.unanswered import RESENT_SOON, sockets_of, unanswered
from parallelrun.errors import EnvironmentProblem, Problem

CONNECT_S = 60.0  # for ssh to connect and the agent to greet
END_S = 5.0  # after the stdin of the agents was closed
SSH_FAILED, SSH_TIMEOUT = 255, "Timeout, server "  # what it prints when its questions were not answered
NO_ANSWER = "it does not answer"
SSH_CONNECT_S, SSH_CONNECT_AGAIN_S, SSH_CONNECT_CUT_S = 20, 4, 2
# ssh ends if a host is silent for 2 s, and then does not answer three questions in 6 s
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")
_AGENT = "parallelrun.cli.host_agent"
_TICK_S = 0.1
SILENT_BEATS = 60  # of the launcher, 30 s in which it runs: it may be stopped itself, and then nobody is silent

CLOSED = "closed"  # the message of a connection that has ended


class HostConnection:
    """The connection to one host's agent, over ssh or to a process of this host.

    hello: the greeting of the agent, once it has come; complaints: stderr of ssh and the login shell before that;
    messages: gets `(connection, what, content)` for each message of the agent after its greeting; is_cut: it was ended
    because the host had not acknowledged what was sent; why: we have ended it; is_closed: it has ended; silence: beats
    of the launcher since the agent was heard, None while it has no ranks: it beats between its tasks only.
    """

    def __init__(
        self, host: HostRanks, ssh: SshOptions, messages: SimpleQueue[tuple[HostConnection, str, Any]],
        connect_s: int = SSH_CONNECT_S,
    ):  # fmt: skip
        """Start the agent. connect_s: how long ssh tries to connect."""
        self.name, self.is_here = host.name, host.is_here
        self.hello: Hello | None = None
        self.complaints: list[str] = []
        self.is_cut = self.is_closed = False
        self.why = ""
        self.silence: int | None = None
        self._messages, self._ssh = messages, ssh
        self._sockets: frozenset[int] | None = None
        try:
            self.process = self._start_here() if self.is_here else self._start_there(connect_s)
        except FileNotFoundError as error:
            problem = Problem("ssh is not installed on this host", f"-H {self.name}", command="install openssh-client")
            raise EnvironmentProblem(problem) from error
        streams = ((self._answers, sys.stdout), (self.process.stderr, sys.stderr))
        self._relays = [threading.Thread(target=self._relay, args=pair, daemon=True) for pair in streams if pair[0]]
        for thread in self._relays:
            thread.start()

    def _start_here(self) -> subprocess.Popen[bytes]:
        """Start an agent whose stdin carries its messages, too: the ranks of this host share our terminal."""
        self._own, theirs = socket.socketpair()
        command = [sys.executable, "-m", _AGENT, LOCAL]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
        self._answers: IO[bytes] | None = self._own.makefile("rb")
        return process

    def _start_there(self, connect_s: int) -> subprocess.Popen[bytes]:
        command, pipe = remote_command(self.name, self._ssh, connect_s), subprocess.PIPE
        # its own session: Ctrl-C reaches only this process, which forwards it
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._answers = process.stdout
        return process

    def _relay(self, source: IO[bytes], target: TextIO) -> None:
        """Show the host's output, each line with its host, and take the agent's messages out of it."""
        for raw in source:
            text, mark, message = raw.decode(errors="replace").removesuffix("\n").partition(MARK)
            if text or not mark:
                self._show(text, source, target)
            if mark:
                ((what, content),) = json.loads(message).items()
                if what == "hello":
                    self.hello = Hello(**content)
                else:
                    self._messages.put((self, what, content))
        if source is self._answers:
            self.is_closed = True
            self._messages.put((self, CLOSED, None))

    def _show(self, line: str, source: IO[bytes], target: TextIO) -> None:
        """Print a line of the ranks. Before the greeting it is one of a login shell, or a complaint of ssh."""
        if source is self.process.stderr and line.startswith(SSH_TIMEOUT):
            self.is_cut, self.why = True, NO_ANSWER
        if self.hello is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed terminal does not end the run
                target.write(f"[{self.name}] {line}\n")
                target.flush()
        elif source is self.process.stderr and line.strip():
            self.complaints.append(line.strip())

    def send(self, what: str, content: Any) -> None:
        """Send a message to the agent, unless it has ended: see `host_agent.Agent`."""
        data = json.dumps({what: content}).encode() + b"\n"
        with contextlib.suppress(OSError, ValueError):
            if self.process.stdin is None:
                self._own.sendall(data)
            else:
                self.process.stdin.write(data)
                self.process.stdin.flush()

    @property
    def sockets(self) -> frozenset[int]:
        """The sockets of ssh, whose data the host acknowledges: none on this host, through a proxy, or too early."""
        if self.hello is None or self.is_here:
            return frozenset()
        if self._sockets is None:
            self._sockets = sockets_of(self.process.pid)
        return self._sockets

    def cut(self) -> None:
        """End the connection to a host that does not answer; its message is CLOSED."""
        self.is_cut, self.why = True, NO_ANSWER
        self.process.kill()

    def hang_up(self) -> None:
        """Close the agent's stdin, which makes it end its ranks and itself."""
        with contextlib.suppress(OSError):
            if self.process.stdin is None:
                self._own.shutdown(socket.SHUT_WR)
            else:
                self.process.stdin.close()

    def kill(self) -> None:
        """Kill the agent, which may be stopped, and with it its ranks; its last message is CLOSED."""
        if self.hello is not None and not (self.is_here or self.is_cut or self.is_closed):
            command = ssh_command(self.name, self._ssh, SSH_CONNECT_AGAIN_S, f"kill -KILL {self.hello.pid}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=2 * SSH_CONNECT_AGAIN_S)
        self.process.kill()

    def end(self, deadline: float) -> None:
        """Hang up, and wait until the agent has ended and its output is shown; kill it after the deadline."""
        self.hang_up()
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.wait()
        for thread in self._relays:
            thread.join(END_S)

    def unreachable(self) -> Problem:
        """The reason why this host's agent did not greet."""
        code = self.process.poll()
        if code is not None:
            self.end(time.monotonic())
        ended = f"no answer in {CONNECT_S:g} s" if code is None else f"exit code {code}"
        why = "; ".join(self.complaints[-3:]) or ended
        how = "cannot be reached by ssh" if code in (None, SSH_FAILED) else "cannot start parallelrun"
        doctor = shlex.join([sys.executable, "-m", "parallelrun", "doctor"])
        test = shlex.join(["ssh", *self._ssh.words(), self.name.strip("[]"), doctor])
        return Problem(f"{self.name} {how}: {why}", "-H", command=test)


def remote_command(name: str, ssh: SshOptions, connect_s: int = SSH_CONNECT_S) -> list[str]:
    """The command that starts an agent on another host: this Python in this directory, with its search paths."""
    needed = [f"{name}={os.environ[name]}" for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if os.environ.get(name)]
    agent = ["env", *needed, sys.executable, "-m", _AGENT]
    return ssh_command(name, ssh, connect_s, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}")


def ssh_command(name: str, ssh: SshOptions, connect_s: int, for_login_shell: str) -> list[str]:
    """The command that lets the login shell of a host do something; ssh tries to connect for so many seconds."""
    return [*_SSH, "-o", f"ConnectTimeout={connect_s}", *ssh.words(), name.strip("[]"), for_login_shell]


class Connections:
    """The connections to the hosts of a run, while it lasts. No process outlives the context.

    signals: gets those that arrive; prepare: what every agent must import, as in `host_agent.Agent`, if the ranks may
    be started again: then a host that does not answer is given up after some 3 s, before ssh does.
    """

    def __init__(self, ssh: SshOptions, signals: list[int], prepare: Mapping[str, Any] | None = None):
        self.signals = signals
        self.messages: SimpleQueue[tuple[HostConnection, str, Any]] = SimpleQueue()
        self.by_name: dict[str, HostConnection] = {}
        self._ssh, self._prepare = ssh, prepare
        self._cut: set[str] = set()
        self._next_beat = 0.0

    def __enter__(self) -> Connections:
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + END_S
        for one in self.by_name.values():
            one.hang_up()
        for one in self.by_name.values():
            one.end(deadline)

    def open(self, hosts: Sequence[HostRanks], again: bool = False) -> None:
        """Begin to connect to `hosts`. again: they may be gone, so ssh tries for a short time."""
        for host in hosts:
            connect_s = SSH_CONNECT_CUT_S if host.name in self._cut else SSH_CONNECT_AGAIN_S if again else SSH_CONNECT_S
            self.by_name[host.name] = one = HostConnection(host, self._ssh, self.messages, connect_s)
            if self._prepare is not None:
                one.send("resent", RESENT_SOON)
                one.send("prepare", self._prepare)

    def drop(self, name: str) -> None:
        """Forget a host; its ranks end, if it can still be reached."""
        dropped = self.by_name.pop(name)
        dropped.end(time.monotonic())
        if dropped.is_cut:
            self._cut.add(name)

    def greeted(self, names: Sequence[str], timeout_s: float) -> list[HostConnection]:
        """Wait until the agents of these hosts have greeted. Return those that have not. A signal raises
        KeyboardInterrupt."""
        deadline = time.monotonic() + timeout_s
        agents = [self.by_name[name] for name in names]
        while waiting := [agent for agent in agents if agent.hello is None]:
            if self.signals:
                raise KeyboardInterrupt
            if time.monotonic() > deadline or all(agent.process.poll() is not None for agent in waiting):
                break
            time.sleep(_TICK_S)
        return waiting

    def must_greet(self, names: Sequence[str]) -> None:
        """Wait until all these hosts have greeted. Raises EnvironmentProblem naming every host that has not."""
        if silent := self.greeted(names, CONNECT_S):
            raise EnvironmentProblem(*(agent.unreachable() for agent in silent))

    def next_message(self) -> tuple[HostConnection, str, Any] | None:
        """Return the next message of an agent; None if there is none for a moment."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            self._end_silent()
            if self._prepare is not None:
                self._beat()
        with contextlib.suppress(queue.Empty):
            found = self.messages.get(timeout=_TICK_S)
            if found[0].silence is not None:
                found[0].silence = 0
            return found
        return None

    def _end_silent(self) -> None:
        """Kill the agents that have not been heard for long: a stopped one would never tell that its ranks end."""
        for one in self.by_name.values():
            if one.silence is not None:
                one.silence += 1
                if one.silence > SILENT_BEATS:
                    one.silence, one.why = None, "its agent does not answer"
                    one.kill()

    def _beat(self) -> None:
        """Write to every host, and end the connections to those whose kernels no longer answer."""
        for one in self.by_name.values():
            if one.sockets:
                one.send("alive", None)
        sockets = {name: one.sockets for name, one in self.by_name.items()}
        for name in unanswered(sockets, RESENT_SOON):
            self.by_name[name].cut()

    def send_signal(self, names: Sequence[str], number: int) -> None:
        """Let the agents of these hosts send a signal to their ranks."""
        for name in names:
            if name in self.by_name:
                self.by_name[name].send("signal", signal.Signals(number).name)
