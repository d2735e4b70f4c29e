"""The supervisor of one host: starts the ranks, watches them, and ends all of them when one fails.

It replaces torchrun, whose store listens on every interface, which names the wrong rank after a hang, exits with 1 for
every failure, and leaves the ranks running when it is killed (each has a launch test).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing import connection

from parallelrun.base import elapsed, stop_signals
from parallelrun.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_TERMINATED
from parallelrun.base.stop_signals import STOP_SIGNALS
from parallelrun.base.wording import counted, print_note
from parallelrun.distributed import sequences
from parallelrun.launch.failures import failure, hang
from parallelrun.launch.failures.failure import GRACE_S, Failure
from parallelrun.launch.failures.outcome import Outcome
from parallelrun.launch.host import emulation, os_process
from parallelrun.launch.host.directory import Status
from parallelrun.launch.host.heartbeat import NOT_RETURNED, HeartbeatFile
from parallelrun.launch.host.job import Job
from parallelrun.launch.ranks import processes

INTERRUPT_S = 3.0  # after Ctrl-C: time to unwind
TICK_S = 0.1
LOOK_S = 2.0  # of silence, after which the ranks' first collectives are compared
LATEST_LOOK_S = 20.0  # after which they are, though some ranks still issue more: reading all takes a crowded core away
SYNCHRONOUS = ("start", "build", "finish")  # phases in which every rank waits for every other


def supervise(job: Job, signals: list[int] | None = None) -> Outcome:
    """Run the job's ranks to their end. None of their processes outlives this call, or this process.

    signals: those that arrived before; gets those that arrive.
    """
    supervisor = Supervisor(job, signals)
    with stop_signals.handlers((signal.SIGINT, *STOP_SIGNALS), lambda number, _: supervisor.arrived.append(number)):
        try:
            with elapsed.shown(f"starting {counted(job.plan.world, 'rank')}", supervisor.has_begun):
                processes.preload(job)
                supervisor.start()
                return supervisor.watch()
        finally:
            supervisor.end_all()


class Supervisor:
    """The state of one supervision; `watch` is its loop."""

    def __init__(self, job: Job, arrived: list[int] | None = None):
        self._job = job
        self._heartbeats = HeartbeatFile(job.plan.world)
        self._status = Status(job.directory)
        self._alive: dict[int, int] = {}  # rank -> pid
        self._pids: list[int] = []
        self._pidfds: dict[int, int] = {}  # of living ranks
        self._codes: dict[int, int] = {}
        self._failures: list[Failure] = []
        self._ended_by_us: set[int] = set()
        self._lost: set[int] = set()  # all ranks of workers without which the run continues
        self._deadline = float("inf")  # when the remaining ranks are killed
        self.arrived = [] if arrived is None else arrived  # signals, handled or not
        self._signals: list[int] = []  # those that are handled
        self._verdict: Outcome | None = None
        self._next_look = self._latest_look = 0.0
        self._num_bytes, self._grew = 0, float("-inf")  # of the ranks' sequences, and when they last grew
        self._oom_kills = os_process.oom_kills()

    def start(self) -> None:
        """Start the ranks, unless a signal arrived while the launcher was importing."""
        self._handle_signals()
        if self._signals:
            self._verdict = self._verdict or Outcome(EXIT_TERMINATED, note="terminated before the first step")
            return
        for rank, pid in enumerate(processes.start(self._job, self._heartbeats)):
            self._alive[rank] = pid
            self._pids.append(pid)
            self._pidfds[rank] = os.pidfd_open(pid)

    def has_begun(self) -> bool:
        """Return whether the first rank has built its model, and may print."""
        return self._heartbeats.has_begun(0)

    def watch(self) -> Outcome:
        """Wait for all ranks; act on failures, hangs and signals."""
        while self._alive:
            self._handle_signals()
            self._reap()
            self._tick()
            if self._alive:
                connection.wait(self._pidfds.values(), TICK_S)  # sleeps until a rank exits
        return replace(self._outcome(), step=self._step(), failed_save_step=self._heartbeats.failed_save())

    def end_all(self) -> None:
        """Kill and reap the remaining ranks."""
        self._kill_all()
        for pid in self._alive.values():
            with contextlib.suppress(ChildProcessError):
                os_process.reap(pid, wait=True)
        for descriptor in (*self._pidfds.values(), self._heartbeats.descriptor):
            os.close(descriptor)
        self._alive.clear()
        self._pidfds.clear()

    def _kill_all(self) -> None:
        for rank, pid in self._alive.items():
            self._ended_by_us.add(rank)
            os_process.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Act on the ranks that have exited. Those that a signal ended come first: others may fail because of them."""
        codes = [(code, rank) for rank, pid in self._alive.items() if (code := os_process.reap(pid)) is not None]
        for code, rank in sorted(codes):
            self._on_exit(rank, code)

    def _on_exit(self, rank: int, code: int) -> None:
        now = time.monotonic_ns()
        del self._alive[rank]
        os.close(self._pidfds.pop(rank))
        failed = code != self._heartbeats.returned(rank) and rank not in self._ended_by_us
        if rank in self._lost:  # another rank of its worker was lost before
            return
        if failed and self._is_spare(rank, code):
            plan = self._job.plan
            of_worker = plan.mesh.group_of(rank, *plan.worker_ranks.split("+"))
            self._lost.update(of_worker)
            for other in self._alive.keys() & of_worker:  # they cannot go on without it
                os_process.kill(self._alive[other], signal.SIGKILL)
            left = (plan.num_workers - len(self._lost)) // len(of_worker)
            reason = self._of_exit(rank, code, now).what
            print_note(f"warning: rank {rank} {reason}; continuing with {left} workers")
            return
        self._codes[rank] = code
        if failed:
            self._fail(rank, code, now)

    def _is_spare(self, rank: int, code: int) -> bool:
        """Return whether the run can continue without this rank: no rank waits for it, and it wrote no failure."""
        plan, underway = self._job.plan, self._heartbeats.read(rank).phase not in SYNCHRONOUS
        is_worker = plan.role(rank) == "worker" and plan.mesh.coordinate(rank)[plan.worker_axis] != 0
        ending = bool(self._failures or self._signals)
        spare = plan.data.spare_workers(plan.num_replicas)
        has_spare = len(self._lost) * plan.num_replicas < spare * plan.num_workers
        return is_worker and code < 0 and underway and not ending and has_spare

    def _of_exit(self, rank: int, code: int, now: int) -> Failure:
        return failure.of_exit(rank, code, now, out_of_memory=os_process.oom_kills() > self._oom_kills)

    def _fail(self, rank: int, code: int, now: int) -> None:
        if code == EXIT_INTERRUPTED and self._signals:
            return
        pid = self._pids[rank]
        recorded = failure.recorded(self._job.directory, self._heartbeats, rank, pid) if code >= 0 else None
        self._failures.append(recorded or self._of_exit(rank, code, now).at(self._heartbeats.read(rank), pid))
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _handle_signals(self) -> None:
        while len(self._signals) < len(self.arrived):
            self._on_signal(self.arrived[len(self._signals)])

    def _on_signal(self, number: int) -> None:
        """First Ctrl-C: let the ranks unwind. First SIGTERM: finish the step and save. Second signal: end at once."""
        again, interrupt = bool(self._signals), number == signal.SIGINT
        self._signals.append(number)
        if again or interrupt:
            code, verb = (EXIT_INTERRUPTED, "interrupted") if interrupt else (EXIT_TERMINATED, "terminated")
            self._verdict = Outcome(code, note=f"{verb} at step {self._step()}")
        if again:
            self._deadline = 0.0
        elif interrupt:
            for pid in self._alive.values():
                os_process.kill(pid, signal.SIGINT)
            self._deadline = min(self._deadline, time.monotonic() + INTERRUPT_S)
        else:
            self._heartbeats.request_stop()
            name = signal.Signals(number).name
            print(f"{name}: finishing the step, saving, exiting (a second signal ends at once)", file=sys.stderr)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._alive and not self._failures and self._verdict is None:
            cause = hang.find(self._job, self._heartbeats, self._alive) or self._mismatch(now)
            if cause is not None:
                self._failures.append(cause.at(self._heartbeats.read(cause.rank), self._pids[cause.rank]))
                self._deadline = 0.0
        if now >= self._deadline:
            self._kill_all()
        self._status.update(self._step(), self._heartbeats.failed_save(), partial(self._heartbeats.rows, self._alive))

    def _mismatch(self, now: float) -> Failure | None:
        """Return the Failure of a rank that issued different collectives, if a rank has been silent for LOOK_S and no
        rank has issued another one since."""
        size = sequences.num_bytes(self._job.directory)
        if size != self._num_bytes:
            self._num_bytes, self._grew = size, now
            self._latest_look = self._latest_look or now + LATEST_LOOK_S
        if now < self._next_look or all(self._heartbeats.read(rank).age_s < LOOK_S for rank in self._alive):
            return None
        if now - self._grew < LOOK_S and now < self._latest_look:
            return None
        self._next_look, self._latest_look = now + LOOK_S, now + LATEST_LOOK_S
        return failure.of_mismatch(self._job.directory)

    def _step(self) -> int:
        return max(self._heartbeats.read(rank).step for rank in range(self._job.plan.world))

    def _outcome(self) -> Outcome:
        if self._verdict is not None:
            return self._verdict
        if self._failures:
            cause = failure.explained(failure.root_cause(self._failures), self._job.directory)
            host = emulation.host_name(self._job.config, self._job.plan, cause.rank)
            return Outcome(cause.exit_code, replace(cause, host=host))
        codes = {code for code in self._codes.values() if code not in (EXIT_OK, EXIT_PREEMPTED)}
        assert NOT_RETURNED not in codes, "a rank that did not return has failed"
        return Outcome(min(codes, default=max(self._codes.values())))
