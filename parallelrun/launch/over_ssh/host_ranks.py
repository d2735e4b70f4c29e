"""The ranks of one host: started with torchrun's variables, watched, and ended. Torch-free until a rank runs."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from queue import SimpleQueue

from parallelrun.base.errors import EXIT_OK, EXIT_RANK_DIED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.launch.host import os_process
from parallelrun.launch.host.environment import without_launchers
from parallelrun.launch.ranks import processes

PROGRAM = "parallelrun.cli.main"  # a room above this one, which only the processes of ranks enter
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
    """The ranks of this host, started by the constructor. torch has not been used yet, so a fork is safe. The kernel
    kills them when this process ends, in whatever way."""

    def __init__(self, order: Order):
        start = [partial(_run, order, local_rank) for local_rank in range(order.num_ranks)]
        self._pids = {order.first_rank + i: processes.fork(run) for i, run in enumerate(start)}  # while they live
        self._codes: dict[int, int] = {}  # rank -> exit code, in the order in which they ended
        self._ended_by_us = False
        self._deadline = float("inf")

    def watch(self, signals: SimpleQueue[str]) -> int:
        """Wait for all ranks and forward the signals. Return the exit code of this host."""
        while not self.have_ended():
            with contextlib.suppress(queue.Empty):
                self._send(signal.Signals[signals.get(timeout=_TICK_S)])
        return self.exit_code()

    def have_ended(self) -> bool:
        """Look after the ranks; return whether all have ended. GRACE_S after the first has failed they are killed."""
        self._reap()
        if self._pids and any(code != EXIT_OK for code in self._codes.values()):
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)
        if self._pids and time.monotonic() > self._deadline:
            self._ended_by_us = True
            self._send(signal.SIGKILL)
        return not self._pids

    def _send(self, number: int) -> None:
        """Send a signal to all ranks that live."""
        for pid in self._pids.values():
            os_process.kill(pid, number)

    def _reap(self) -> None:
        for rank, pid in list(self._pids.items()):
            code = os_process.reap(pid)
            if code is not None:
                del self._pids[rank]
            if code is not None and not (self._ended_by_us and code == -signal.SIGKILL):
                self._codes[rank] = code

    def exit_code(self) -> int:
        """The code of rank 0, which knows the cause; else that of the rank that failed first."""
        codes = [code for code in (self._codes.get(0, 0), *self._codes.values()) if code != EXIT_OK]
        if not codes:
            return EXIT_RANK_DIED if self._ended_by_us else EXIT_OK
        return codes[0] if codes[0] > 0 else EXIT_RANK_DIED


def _run(order: Order, local_rank: int) -> int:
    """As the process of one rank: run the program with torchrun's variables."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.unblock_signals()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    environ = variables(order, local_rank, os.environ)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["parallelrun", *order.words]
    code: int = import_module(PROGRAM).main(order.words)
    return code


def variables(order: Order, local_rank: int, host: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: this host's, overridden by the order's, and torchrun's variables for the rank."""
    merged = {**without_launchers(host), **order.environ}
    paths = [path for environ in (order.environ, host) for path in environ.get("PATH", "").split(os.pathsep) if path]
    merged["PATH"] = os.pathsep.join(dict.fromkeys(paths))
    merged.update(RANK=str(order.first_rank + local_rank), LOCAL_RANK=str(local_rank))
    return merged
