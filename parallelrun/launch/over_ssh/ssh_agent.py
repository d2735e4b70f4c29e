"""The process that `launch/over_ssh/ssh.py` starts on each host: it starts this host's ranks, and ends with the
connection.

Over ssh, its first line of stdout is MARK and its address. The first line of its stdin is the `Order` as JSON, each
following one the name of a signal for the ranks. When stdin ends, because the launcher has ended or the connection was
lost, it exits, and the kernel kills its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from parallelrun.base.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.launch.host import os_process
from parallelrun.launch.host.environment import without_launchers
from parallelrun.launch.ranks.rank import end, leave_with_parent

MARK = "\x1eparallelrun: "  # a login shell may print lines before it
LOCAL = "local"  # argument: this is the host of the launcher, whose terminal the ranks share
GRACE_S = 10.0  # after a rank has failed: time for the others to notice and report it
_TICK_S = 0.05


@dataclass(frozen=True)
class Order:
    """The ranks that a host must start, each as `parallelrun <words>` with the variables `environ`: the launcher's,
    and those of torchrun that the ranks of a host share."""

    words: list[str]
    first_rank: int
    num_ranks: int
    environ: dict[str, str]


class Ranks:
    """The ranks of this host, started by the constructor. The kernel kills them when this process ends."""

    def __init__(self, order: Order):
        numbers = range(order.first_rank, order.first_rank + order.num_ranks)
        self._pids = {rank: _start(order.words, variables(order, rank, os.environ)) for rank in numbers}

    def send(self, number: int) -> None:
        """Send a signal to all ranks that live."""
        for pid in list(self._pids.values()):
            os_process.kill(pid, number)

    def wait(self) -> int:
        """Wait for all ranks, which are killed GRACE_S after the first has failed. Return the exit code of this host:
        that of rank 0, which knows the cause, else that of the rank that failed first."""
        codes: dict[int, int] = {}  # by rank, in the order in which they ended, without those that were killed here
        deadline, killed = float("inf"), False
        while self._pids:
            for rank, pid in list(self._pids.items()):
                code = os_process.reap(pid)
                if code is not None:
                    del self._pids[rank]
                    codes[rank] = EXIT_OK if killed and code == -signal.SIGKILL else code
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                killed = True
                self.send(signal.SIGKILL)
            time.sleep(_TICK_S)
        failed = [code for code in (codes.get(0, EXIT_OK), *codes.values()) if code != EXIT_OK]
        return max(failed[0], 0) or EXIT_RANK_DIED if failed else EXIT_OK


def _start(words: list[str], environ: Mapping[str, str]) -> int:
    """Start `parallelrun <words>`, which ends with this process, in a session of its own: Ctrl-C reaches the launcher
    only. Return its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "parallelrun", *words],
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
        preexec_fn=partial(leave_with_parent, os.getpid()),
    )
    process.returncode = 0  # `Ranks` reaps the process, not this object
    return process.pid


def variables(order: Order, rank: int, host: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank: this host's, overridden by the order's, and torchrun's variables for it."""
    paths = [path for environ in (order.environ, host) for path in environ.get("PATH", "").split(os.pathsep) if path]
    own = {"PATH": os.pathsep.join(dict.fromkeys(paths)), "RANK": str(rank), "LOCAL_RANK": str(rank - order.first_rank)}
    return {**without_launchers(host), **order.environ, **own}


def main(arguments: list[str]) -> int:
    """Run the ranks that the launcher orders; return the exit code of this host."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, lambda *_: None)  # the launcher forwards those that matter
    if LOCAL not in arguments:
        address = os.environ["SSH_CONNECTION"].split()[2]  # of this host, as the launcher sees it
        print(f"{MARK}{address}", flush=True)
    order = sys.stdin.buffer.readline()
    if not order:
        return EXIT_OK
    ranks = Ranks(Order(**json.loads(order)))
    threading.Thread(target=_forward_signals, args=(ranks,), daemon=True).start()
    return ranks.wait()


def _forward_signals(ranks: Ranks) -> None:
    for line in sys.stdin.buffer:
        ranks.send(signal.Signals[line.decode().strip()])
    os._exit(EXIT_RANK_DIED)


if __name__ == "__main__":
    end(main(sys.argv[1:]))
