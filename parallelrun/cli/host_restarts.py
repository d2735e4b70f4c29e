"""`restarts=N` over several hosts: ranks that fail are started again, on the hosts that can still be reached.

Each attempt is one `HostLauncher`. The ranks of the next one find the run by the variables that torchrun would set
(`launch/reattach.py`), and go on from its last checkpoint. A host that is gone is replaced by one with free slots, or
the run goes on with fewer ranks (`elastic=true`). Torch-free.
"""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from parallelrun.cli import hosts as host_list
from parallelrun.cli.host_launcher import HostConnection, HostLauncher, await_hellos
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.config.schema import Config
from parallelrun.errors import EXIT_OK
from parallelrun.launch import reattach
from parallelrun.launch.directory import Status
from parallelrun.launch.rank import STOP_SIGNALS
from parallelrun.launch.supervisor import signal_handlers
from parallelrun.plan import elastic
from parallelrun.plan.freeze import load_frozen
from parallelrun.plan.resolve import resolve
from parallelrun.run_records import attempts
from parallelrun.run_records.attempts import Attempt
from parallelrun.wording import counted

RECONNECT_S = 25.0  # for a host to answer again; ssh gives up after 20 s


def run(hosts: Sequence[HostRanks], words: Sequence[str], ssh: SshOptions, asked: Config) -> int:
    """Run `parallelrun <words>` on all hosts, again after failures; return the exit code of the last attempt.

    asked: the configuration that `words` mean. No process outlives this call. Raises EnvironmentProblem when a host
    cannot be reached at the first start.
    """
    name, left = secrets.token_hex(8), tuple(hosts)
    signals: list[int] = []
    with signal_handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: signals.append(number)):
        for number in count():
            variables = reattach.variables(name, asked.restarts, number)
            code = HostLauncher(left, words, ssh, signals, variables).run()
            if code == EXIT_OK or signals:
                break
            variables = reattach.variables(name, asked.restarts, number + 1)
            directory = reattach.earlier(Path(asked.runs).expanduser(), variables)
            if directory is None:  # it has failed before a run began
                break
            outcome, history, decision = reattach.judged(directory, asked.restarts, _of_ranks(left))
            if not decision.restart:
                print(f"  not restarted: {decision.why}", file=sys.stderr, flush=True)
                return decision.exit_code or outcome.exit_code
            without = history[-1].host if decision.without is not None and asked.elastic else ""
            slots = _slots_left(hosts, ssh, signals, without)
            left = _placed(asked, directory, history[-1], slots)
            if not left:
                why = _too_few(asked, history[-1].world, slots, hosts)
                Status(directory, history[-1].step).ended(code, f"{history[-1].error}; {why}", history[-1].rank)
                print(f"  not restarted: {why}", file=sys.stderr, flush=True)
                break
    return code


def _too_few(asked: Config, world: int, slots: Mapping[str, int], hosts: Sequence[HostRanks]) -> str:
    """Why no plan fits the slots that are left."""
    gone = [one.name for one in hosts if one.name not in slots]
    why = f"{counted(sum(slots.values()), 'slot')} left for {counted(world, 'rank')}"
    why += f" without {', '.join(gone)}" if gone else ""
    if asked.elastic:
        return f"{why}, and no plan fits (min_world={elastic.least_world(asked)})"
    return f"{why}; elastic=true goes on with fewer"


def _slots_left(hosts: Sequence[HostRanks], ssh: SshOptions, signals: Sequence[int], without: str) -> dict[str, int]:
    """Return the slots of the hosts that answer; name the others. without: the host that loses a slot."""
    probes = [HostConnection(one, ssh, serves=False) for one in hosts if not one.is_here]
    try:
        gone = [one.name for one in await_hellos(probes, signals, RECONNECT_S)]
    finally:
        for one in probes:
            one.hang_up()
            one.process.kill()  # an agent without an order ends with its connection
            one.process.wait()
    for name in gone:
        print(f"warning: {name} cannot be reached by ssh: it is left out", file=sys.stderr, flush=True)
    slots = {one.name: one.slots for one in hosts if one.name not in gone}
    if without in slots:
        slots[without] -= 1
    return slots


def _of_ranks(hosts: Sequence[HostRanks]) -> list[str]:
    """The name of each rank's host."""
    return [one.name for one in hosts for _ in range(one.num_ranks)]


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
