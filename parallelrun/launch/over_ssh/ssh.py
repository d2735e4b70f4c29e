"""Start the ranks of several hosts from one machine over ssh, as horovodrun does: `-np 16 -H server1:4,server2:4`.

Each host's agent (`launch/over_ssh/ssh_agent.py`) starts ranks with torchrun's variables, and from then on they are
ranks as under torchrun (`launch/entry/attach.py`). torchrun itself always exits with 1, and its ranks outlive it if it
is killed. The user's words never pass a remote shell: they are sent to the agents' stdin."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from parallelrun.base.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RANK_DIED,
    EXIT_TERMINATED,
    EnvironmentProblem,
)
from parallelrun.base.stop_signals import STOP_SIGNALS, handlers
from parallelrun.launch.host import interfaces
from parallelrun.launch.host.environment import TOKEN, for_other_hosts
from parallelrun.launch.over_ssh.hosts import HostRanks
from parallelrun.launch.over_ssh.ssh_agent import GRACE_S, Order
from parallelrun.launch.over_ssh.ssh_connection import CONNECT_S, SshConnection

OTHERS_S = GRACE_S + 5.0  # after a host has ended with a failure: time for the others to notice, to report and to end
INTERRUPT_S = 5.0  # after Ctrl-C: time to unwind
END_S = 5.0  # for an agent to end after its stdin was closed
_PORTS = range(20_000, 30_000)  # rank 0 listens on a random one, or one of the seven after it
_TICK_S = 0.05


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh_config: str | None) -> int:
    """Run `parallelrun <words>` on all hosts and return its exit code. No process outlives this call.

    ssh_config: ssh's -F. Raises EnvironmentProblem when a host cannot be reached or has no parallelrun.
    """
    signals: list[int] = []
    with (
        handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)),
        SshRun([host for host in hosts if host.num_ranks], ssh_config, signals) as started,
    ):
        started.start(words)
        return started.watch()


class SshRun:
    """The ranks over several hosts. No process of it outlives the context."""

    def __init__(self, hosts: Sequence[HostRanks], ssh_config: str | None, signals: Sequence[int]):
        self._signals, self._num_forwarded = signals, 0
        self._codes: dict[str, int] = {}  # by host, in the order in which they ended
        self._deadline = float("inf")  # when the other hosts are disconnected
        self._agents = [SshConnection(host, ssh_config) for host in hosts]

    def __enter__(self) -> SshRun:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.hang_up()
        deadline = time.monotonic() + END_S
        for agent in self._agents:
            agent.end(deadline)

    def start(self, words: Sequence[str]) -> None:
        """Wait until all hosts are reached, and start their ranks. Raises EnvironmentProblem; a signal raises
        KeyboardInterrupt."""
        deadline = time.monotonic() + CONNECT_S
        while waiting := [agent for agent in self._agents if agent.address is None]:
            if self._signals:
                raise KeyboardInterrupt
            if time.monotonic() > deadline or all(agent.process.poll() is not None for agent in waiting):
                raise EnvironmentProblem(*(agent.unreachable() for agent in waiting))
            time.sleep(_TICK_S)
        hosts = [agent.host for agent in self._agents]
        print(f"starting {', '.join(f'{host.ranks} on {host.name}' for host in hosts)}", file=sys.stderr, flush=True)
        environ = {
            "WORLD_SIZE": str(sum(host.num_ranks for host in hosts)),
            "MASTER_ADDR": _address_of_rank_0([agent.address or "" for agent in self._agents]),
            "MASTER_PORT": str(secrets.choice(_PORTS)),
            TOKEN: secrets.token_hex(16),
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
            **for_other_hosts(os.environ),
        }
        for agent, host in zip(self._agents, hosts):
            order = Order(
                [*words], host.first_rank, host.num_ranks, {**environ, "LOCAL_WORLD_SIZE": str(host.num_ranks)}
            )
            agent.send(json.dumps(asdict(order)))

    def watch(self) -> int:
        """Forward signals until all hosts have ended. Return the run's exit code."""
        while waiting := [agent for agent in self._agents if agent.host.name not in self._codes]:
            for agent in waiting:
                status = agent.process.poll()
                if status is not None:
                    self._record_end(agent, status)
            self._forward_signals(waiting)
            if time.monotonic() > self._deadline:
                for agent in waiting:
                    agent.hang_up()
                    if time.monotonic() > self._deadline + END_S:
                        agent.process.kill()
            time.sleep(_TICK_S)
        return self._exit_code()

    def _record_end(self, agent: SshConnection, status: int) -> None:
        host, was_lost = agent.host, status < 0 or status == agent.LOST
        if was_lost and not agent.is_closed:
            lost = f"error: the connection to host {host.name} ({host.ranks}) was lost"
            print(lost, file=sys.stderr, flush=True)
        self._codes[host.name] = EXIT_RANK_DIED if was_lost else status
        if self._codes[host.name] != EXIT_OK:
            self._deadline = min(self._deadline, time.monotonic() + OTHERS_S)

    def _forward_signals(self, agents: Sequence[SshConnection]) -> None:
        """The first Ctrl-C unwinds, the first SIGTERM ends after a step and a save; a second signal kills."""
        for number in self._signals[self._num_forwarded :]:
            self._num_forwarded += 1
            if self._num_forwarded > 1:
                self._deadline = min(self._deadline, time.monotonic())
            elif number == signal.SIGINT:
                self._deadline = min(self._deadline, time.monotonic() + INTERRUPT_S)
            for agent in agents:
                agent.send(signal.Signals(number).name)

    def _exit_code(self) -> int:
        """Return the signal's code, else that of the first host (rank 0 knows the cause), else of the first failed
        host. Hosts that were disconnected do not count, because their code is not the cause."""
        if signal.SIGINT in self._signals:
            return EXIT_INTERRUPTED
        if len(self._signals) > 1:
            return EXIT_TERMINATED
        closed = {agent.host.name for agent in self._agents if agent.is_closed}
        own = {name: code for name, code in self._codes.items() if name not in closed} or self._codes
        first = self._agents[0].host.name
        ordered = [own[name] for name in (first, *own) if name in own]
        return next((code for code in ordered if code not in (EXIT_OK, EXIT_PREEMPTED)), max(ordered))


def _address_of_rank_0(addresses: Sequence[str]) -> str:
    """Return the address at which the others reach rank 0: that of its host, or if that is this host (empty address),
    the one from which packets to another host leave."""
    others = filter(None, addresses[1:])
    return addresses[0] or next(filter(None, map(interfaces.address_towards, others)), os.uname().nodename)
