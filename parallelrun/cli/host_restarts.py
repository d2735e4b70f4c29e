"""`restarts=N` over several hosts: ranks that fail are started again, on the hosts that can still be reached.

Each attempt is one `HostLauncher`; the agents of the hosts stay, with torch imported. The ranks of the next attempt
find the run by the variables that torchrun would set (`launch/reattach.py`), and go on from its last checkpoint. A host
that is gone is replaced by one with free slots, or the run goes on with fewer ranks (`elastic=true`). Torch-free.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from parallelrun.checkpoint import held
from parallelrun.cli import hosts as host_list
from parallelrun.cli import memory_on_disk
from parallelrun.cli.host_connection import Connections
from parallelrun.cli.host_launcher import HostLauncher
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.config.schema import Config
from parallelrun.errors import EXIT_OK
from parallelrun.launch import failure, host_failures, processes, reattach
from parallelrun.launch.directory import Status
from parallelrun.launch.environment import MEMORY_STEP, for_other_hosts
from parallelrun.launch.failure import ConsoleOptions, Failure
from parallelrun.launch.peers import is_recorded
from parallelrun.launch.rank import STOP_SIGNALS
from parallelrun.launch.supervisor import signal_handlers
from parallelrun.plan import elastic
from parallelrun.plan.freeze import load_frozen
from parallelrun.plan.resolve import resolve
from parallelrun.plan.structure import Plan
from parallelrun.run_records import attempts
from parallelrun.run_records.attempts import Attempt
from parallelrun.wording import counted, print_note

RECONNECT_S = 25.0  # for a host to answer again: ssh, and the start of Python

_RANK_MODULES = ("parallelrun.cli.verbs", "parallelrun.config.compose", "parallelrun.launch.start")


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions, asked: Config, plan: Plan) -> int:
    """Run `parallelrun <words>` on all hosts, again after failures; return the exit code of the last attempt.

    asked: the configuration that `words` mean, of which `plan` is resolved. No process outlives this call. Raises
    EnvironmentProblem when a host cannot be reached at the first start.
    """
    signals: list[int] = []
    modules = processes.modules(asked, plan)
    prepare = {
        "modules": [*modules, *(_RANK_MODULES if modules else ())],
        "environ": for_other_hosts(os.environ),
        "memory": asked.checkpoint.memory_every > 0,
    }
    with signal_handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        with Connections(ssh, signals, prepare) as connections:
            connections.open(hosts)
            connections.must_greet([one.name for one in hosts if one.num_ranks])
            return _Attempts(hosts, words, asked, connections).run()


class _Attempts:
    """The attempts of one run over `hosts`."""

    def __init__(self, hosts: Sequence[HostRanks], words: Sequence[str], asked: Config, connections: Connections):
        self._hosts, self._words, self._asked, self._connections = hosts, words, asked, connections
        self._left = tuple(hosts)  # those of the next attempt
        self._name = secrets.token_hex(8)
        self._memory_step = 0  # of the checkpoint in the memory of the hosts

    def run(self) -> int:
        for number in count():
            variables = reattach.variables(self._name, self._asked.restarts, number)
            variables[MEMORY_STEP] = str(self._memory_step)
            launcher = HostLauncher(self._left, self._words, self._connections, variables, judges=True)
            code = launcher.run()
            if code == EXIT_OK or self._connections.signals:
                if code != EXIT_OK:
                    self._keep_on_disk(number)
                break
            found = self._after(number, code, launcher)
            if found is not None:
                return found
        return code

    def _after(self, number: int, code: int, launcher: HostLauncher) -> int | None:
        """Decide what follows an attempt that has failed. Return the exit code of the run; None for another attempt."""
        ended = time.time()
        variables = reattach.variables(self._name, self._asked.restarts, number + 1)
        directory = reattach.earlier(Path(self._asked.runs).expanduser(), variables)
        if directory is None:  # it has failed before a run began
            return code
        seen = host_failures.cause(directory, launcher.exits, launcher.lost)
        told = is_recorded(directory)
        hosts_of_ranks = [one.name for one in self._left for _ in range(one.num_ranks)]
        outcome, history, decision = reattach.judged(directory, self._asked.restarts, hosts_of_ranks, seen)
        last = history[-1]
        is_last = not decision.restart or number >= self._asked.restarts
        if is_last:
            self._keep_on_disk(number)
        if seen is not None and not told:
            self._tell(seen, directory, last, decision.restart)
        if is_last:
            why = decision.why or "the last attempts failed before they began"
            print(f"  not restarted: {why}", file=sys.stderr, flush=True)
            return decision.exit_code or outcome.exit_code
        without = last.host if decision.without is not None and self._asked.elastic else ""
        slots = self._slots_left(without)
        self._left = _placed(self._asked, directory, last, slots)
        if not self._left:
            self._keep_on_disk(number)
            why = _too_few(self._asked, last.world, slots, self._hosts)
            Status(directory, last.step).ended(code, f"{last.error}; {why}", last.rank)
            print(f"  not restarted: {why}", file=sys.stderr, flush=True)
            return code
        of_memory = last.checkpoint is not None and not Path(last.checkpoint).is_relative_to(directory)
        if self._asked.checkpoint.memory_every:
            self._keep(is_bad=decision.bad_checkpoint and of_memory)
        Status(directory, last.step).running(last.step)
        noticed = launcher.noticed or ended
        attempts.mark(directory, noticed=noticed, ended=ended, hosts=time.time())
        return None

    def _keep_on_disk(self, number: int) -> None:
        """As the run ends: save what only the hosts' memory has."""
        variables = reattach.variables(self._name, self._asked.restarts, number + 1)
        directory = reattach.earlier(Path(self._asked.runs).expanduser(), variables)
        if directory is not None and self._asked.checkpoint.memory_every:
            memory_on_disk.keep_on_disk(self._connections, directory)

    def _keep(self, is_bad: bool) -> None:
        """Choose the newest checkpoint of which the next ranks' hosts have all files in memory. is_bad: none, because
        the last one could not be loaded."""
        agents = [self._connections.by_name[one.name] for one in self._left if one.num_ranks]
        found = held.newest([agent.held for agent in agents]) if not is_bad else None
        if found is None and any(agent.held for agent in agents):
            why = "is damaged" if is_bad else "has lost files with a host"
            print(
                f"warning: the checkpoint in memory {why}: the run goes on from the disk", file=sys.stderr, flush=True
            )
        self._memory_step = found[0] if found else 0
        for agent in agents:
            agent.send("keep", found)

    def _tell(self, seen: Failure, directory: Path, last: Attempt, restarts: bool) -> None:
        """Print why the ranks failed, and how to go on by hand if the run does not."""
        plan = resolve(load_frozen(attempts.config_file(directory, last.number).read_text()))
        options = ConsoleOptions(tuple(word for word in self._words if "=" in word))
        lines = failure.headline(seen, plan) if restarts else failure.message(seen, plan, directory, options)
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _slots_left(self, without: str) -> dict[str, int]:
        """Return the slots of the hosts that answer; name the others. without: the host that loses a slot."""
        connections = self._connections
        for one in self._hosts:
            known = connections.by_name.get(one.name)
            if known is not None and known.process.poll() is not None and known.hello is not None:
                connections.drop(one.name)
        connections.open([one for one in self._hosts if one.name not in connections.by_name], again=True)
        gone = [one.name for one in connections.greeted([one.name for one in self._hosts], RECONNECT_S)]
        for name in gone:
            connections.drop(name)
            print_note(f"warning: {name} cannot be reached by ssh: it is left out")
        slots = {one.name: one.slots for one in self._hosts if one.name not in gone}
        if without in slots:
            slots[without] -= 1
        return slots


def _too_few(asked: Config, world: int, slots: Mapping[str, int], hosts: Sequence[HostRanks]) -> str:
    """Why no plan fits the slots that are left."""
    gone = [one.name for one in hosts if one.name not in slots]
    why = f"{counted(sum(slots.values()), 'slot')} left for {counted(world, 'rank')}"
    why += f" without {', '.join(gone)}" if gone else ""
    if asked.elastic:
        return f"{why}, and no plan fits (min_world={elastic.least_world(asked)})"
    return f"{why}; elastic=true goes on with fewer"


def _placed(asked: Config, directory: Path, last: Attempt, slots: Mapping[str, int]) -> tuple[HostRanks, ...]:
    """Return the ranks of each host for the next attempt: as many as before, or those of a smaller plan, or none."""
    free = sum(slots.values())
    if free >= last.world:
        return host_list.placed(slots, last.world)
    if not asked.elastic or free == 0:
        return ()
    saved = load_frozen(attempts.config_file(directory, last.number).read_text())
    found = elastic.fitting(asked, saved, resolve(saved), free)
    return host_list.placed(slots, found[1].world) if found else ()
