"""Start the ranks of several hosts from one machine over ssh, as horovodrun does: `-np 16 -H server1:4,server2:4`.

`HostLauncher` is one start of the ranks, through agents that may serve several (`cli/host_restarts.py`).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from parallelrun.cli.host_agent import Hello
from parallelrun.cli.host_connection import CLOSED, END_S, Connections, HostConnection
from parallelrun.cli.host_ranks import GRACE_S as GRACE_OF_RANKS_S
from parallelrun.cli.host_ranks import Order
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.errors import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RANK_DIED,
    EXIT_TERMINATED,
    EnvironmentProblem,
    Problem,
)
from parallelrun.launch import failure, host_failures, interfaces
from parallelrun.launch.environment import JUDGED, TOKEN, for_other_hosts
from parallelrun.launch.failure import ConsoleOptions
from parallelrun.launch.host_failures import Exit, LostHost
from parallelrun.launch.outcome import Outcome, conclude
from parallelrun.launch.peers import is_recorded
from parallelrun.launch.rank import STOP_SIGNALS, Job
from parallelrun.launch.supervisor import signal_handlers
from parallelrun.plan.freeze import load_frozen
from parallelrun.plan.resolve import resolve
from parallelrun.run_records import attempts
from parallelrun.run_records.read import METRICS
from parallelrun.run_records.rows import last_row

GRACE_S = GRACE_OF_RANKS_S + 5.0  # after a host has failed: time for the others to notice, to tell and to end
TOLD_S = 6.0  # after a host was lost: time for the ranks, which are told, to write how the run ended
INTERRUPT_S = 5.0  # after Ctrl-C: time to unwind


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions) -> int:
    """Run `parallelrun <words>` on all hosts and return its exit code. No process outlives this call.

    Raises EnvironmentProblem when a host cannot be reached or has no parallelrun.
    """
    signals: list[int] = []
    with signal_handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        with Connections(ssh, signals) as connections:
            used = [one for one in hosts if one.num_ranks]
            connections.open(used)
            connections.must_greet([one.name for one in used])
            return HostLauncher(used, words, connections).run()


class HostLauncher:
    """The state of one start over several hosts, whose agents have greeted.

    more: variables for all ranks; judges: the caller says why the ranks failed, from `exits` and `lost`, so they exit
    at once. noticed: when the first failure was, in seconds since the epoch; directory: of the run, once it is known.
    """

    def __init__(
        self, hosts: Sequence[HostRanks], words: Sequence[str], connections: Connections,
        more: Mapping[str, str] | None = None, judges: bool = False,
    ):  # fmt: skip
        self._hosts = {one.name: one for one in hosts if one.num_ranks}
        self._words = list(words)
        self._connections = connections
        self._more = {**(more or {}), **({JUDGED: "1"} if judges else {})}
        self._judges = judges
        self._forwarded = 0
        self._deadline = float("inf")  # when the remaining ranks are killed
        self._killed = float("inf")  # when they were
        self._codes: dict[str, int] = {}  # by host, in the order in which they ended
        self._ended_by_us: set[str] = set()  # hosts whose exit codes do not tell the cause
        self._port = -1
        self.exits: list[Exit] = []
        self.lost: list[LostHost] = []
        self.noticed: float | None = None
        self.directory: Path | None = None

    def run(self) -> int:
        """Start the ranks, and wait until all have ended. Return the exit code."""
        code = self.watch() if self.start() else EXIT_RANK_DIED
        if not self._judges or self._connections.signals:
            self._conclude(code)
        return code

    def _conclude(self, code: int) -> None:
        """Write the final status if no rank could, and the run's directory can be seen from here."""
        file = attempts.config_file(self.directory, 1) if self.directory else None
        if self.directory is None or file is None or not file.exists() or is_recorded(self.directory):
            return
        config = load_frozen(file.read_text())
        options = ConsoleOptions(tuple(word for word in self._words if "=" in word))
        job = Job(config, resolve(config), self.directory, options=options)
        signals = self._connections.signals
        cause = None if signals else host_failures.cause(self.directory, self.exits, self.lost)
        name = signal.Signals(signals[0]).name if signals else ""
        step = last_row(self.directory / METRICS).get("step", 0)
        conclude(Outcome(code, cause, f"ended by {name}" if signals else "", step), job)

    def start(self) -> bool:
        """Decide where rank 0 listens, and order every agent to start its ranks. Return whether its host lives."""
        first = next(iter(self._hosts.values()))
        hellos = {name: agent.hello for name, agent in self._connections.by_name.items() if agent.hello}
        address = _own_address(list(hellos.values())) if first.is_here else hellos[first.name].address
        names = {hellos[name].host for name in self._hosts}
        if len(names) > 1 and (address.startswith("127.") or address == "::1"):
            what = f"rank 0 would listen on {address}, which the other hosts cannot reach"
            raise EnvironmentProblem(Problem(what, "-H", "name the first host as the network knows it"))
        if not self._listens(first.name, address):
            return False
        where = ", ".join(f"{one.ranks} on {one.name}" for one in self._hosts.values())
        print(f"starting {where}", file=sys.stderr, flush=True)
        environ = {
            "WORLD_SIZE": str(sum(one.num_ranks for one in self._hosts.values())),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self._port),
            TOKEN: secrets.token_hex(16),
            **for_other_hosts(os.environ),
            **self._more,
        }  # sent through ssh, on no command line
        for name, one in self._hosts.items():
            own = {**environ, "LOCAL_WORLD_SIZE": str(one.num_ranks)}
            order = Order(words=self._words, first_rank=one.first_rank, num_ranks=one.num_ranks, environ=own)
            if name in self._connections.by_name:
                self._connections.by_name[name].send("start", asdict(order))
        return True

    def _listens(self, name: str, address: str) -> bool:
        """Let rank 0's host listen. Return whether it does; it may be lost. A signal raises KeyboardInterrupt."""
        self._connections.by_name[name].send("listen", address)
        while self._port < 0 and name not in self._codes:
            if self._connections.signals:
                raise KeyboardInterrupt
            self._take(self._connections.next_message(), address)
        return self._port >= 0

    def watch(self) -> int:
        """Forward signals until all hosts have ended. Returns the run's exit code."""
        while self._waiting():
            self._take(self._connections.next_message())
            self._pass_signals()
            now = time.monotonic()
            if self._deadline < float("inf") and self.directory is not None and is_recorded(self.directory):
                self._end_within(failure.GRACE_S)  # nobody has more to tell
            if now > self._deadline and self._killed == float("inf"):
                self._ended_by_us |= set(self._waiting())
                self._connections.send_signal(self._waiting(), signal.SIGKILL)
                self._killed = now
            if now > self._killed + END_S:
                for name in self._waiting():
                    self._connections.drop(name)
                    self._codes[name] = EXIT_RANK_DIED
        return self._exit_code()

    def _waiting(self) -> list[str]:
        return [name for name in self._hosts if name not in self._codes]

    def _take(self, message: tuple[HostConnection, str, Any] | None, address: str = "") -> None:
        """Act on a message of an agent."""
        if message is None:
            return
        agent, what, content = message
        if self._connections.by_name.get(agent.name) is not agent:  # it was dropped
            return
        if what == "listening":
            if content["why"]:
                raise _cannot_listen(address, content["why"])
            self._port = content["port"]
        elif what == "exit":
            self.exits.append(replace(Exit(**content), host=agent.name, time_ns=time.monotonic_ns()))
            self._notice()
            if self._judges:  # a hang is explained by the ranks, which takes time
                self._end_within(GRACE_S if content["status"] == EXIT_HANG else failure.GRACE_S)
        elif what == "started":
            agent.silence = 0
        elif what == "run":
            self.directory = Path(content)
        elif what == "ended":
            agent.silence = None
            self._ended(agent.name, content)
        elif what == CLOSED:
            self._lost(agent)

    def _ended(self, name: str, code: int) -> None:
        self._codes[name] = code
        if code != EXIT_OK and not self._judges:
            self._end_within(GRACE_S)

    def _lost(self, agent: HostConnection) -> None:
        """Note the loss of a host; begin to connect again if this start is not the last."""
        self._connections.drop(agent.name)
        host = self._hosts.get(agent.name)
        if host is None or agent.name in self._codes:
            return
        found = LostHost(host.name, host.first_rank, host.ranks, agent.why)
        self._codes[host.name] = EXIT_RANK_DIED
        if self._killed < float("inf"):
            return
        self.lost.append(found)
        self._notice()
        if self._judges:
            self._connections.open([host], again=True)
        else:
            print(f"error: {found.what}", file=sys.stderr, flush=True)
            for name in self._waiting():
                self._connections.by_name[name].send("lost", asdict(found))
        self._end_within(0.0 if self._judges else TOLD_S)  # no rank knows more

    def _notice(self) -> None:
        self.noticed = self.noticed or time.time()

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _pass_signals(self) -> None:
        """Forward signals. The first Ctrl-C unwinds; the first SIGTERM ends after a step and a save; a second kills."""
        for number in self._connections.signals[self._forwarded :]:
            self._forwarded += 1
            if self._forwarded > 1:
                self._deadline = 0.0
            elif number == signal.SIGINT:
                self._end_within(INTERRUPT_S)
            self._connections.send_signal(self._waiting(), number)

    def _exit_code(self) -> int:
        """The signal's code, else that of the first host (rank 0 knows the cause), else of the first failed host."""
        signals = self._connections.signals
        if signals and (signal.SIGINT in signals or len(signals) > 1):
            return EXIT_INTERRUPTED if signal.SIGINT in signals else EXIT_TERMINATED
        own = {name: code for name, code in self._codes.items() if name not in self._ended_by_us} or self._codes
        ordered = [own[name] for name in (next(iter(self._hosts)), *own) if name in own]
        failed = [code for code in ordered if code not in (EXIT_OK, EXIT_PREEMPTED)]
        code = failed[0] if failed else max(ordered)
        return code if code >= 0 else EXIT_RANK_DIED


def _own_address(hellos: Sequence[Hello]) -> str:
    """The address of this host for the others: as they see it, or, since they see a jump host (ProxyJump) instead, the
    one from which packets to them leave."""
    others = [hello for hello in hellos if hello.launcher]
    seen = [hello.launcher for hello in others if interfaces.is_own(hello.launcher)]
    routed = (interfaces.address_towards(hello.address) for hello in others)
    return seen[0] if seen else next(filter(None, routed), os.uname().nodename)


def _cannot_listen(address: str, why: str) -> EnvironmentProblem:
    what = f"rank 0 cannot listen on {address}, its host's address for the others: {why}"
    fix = "start from a host in the same network, or name another host first in -H"
    return EnvironmentProblem(Problem(what, "-H", command=fix))
