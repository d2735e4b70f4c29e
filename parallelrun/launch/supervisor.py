"""Our one-host supervisor: starts the ranks, watches them, and ends them all when one fails.

Why not torchrun in-process: its store listens on every interface, it names the wrong rank for a hang, gives exit code 1
for everything, and leaves the ranks running when it is killed (measured; see the launch tests for each).
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace

from parallelrun.errors import EXIT_HANG, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_TERMINATED
from parallelrun.launch import failure, processes, stacks
from parallelrun.launch.board import NOT_RETURNED, Board
from parallelrun.launch.failure import Failure
from parallelrun.launch.output import log_path
from parallelrun.launch.processes import Job
from parallelrun.launch.status import Status

GRACE_S = 1.0  # after the first failure: time for others to tell theirs
INTERRUPT_S = 3.0  # after Ctrl-C: time to unwind
STATUS_EVERY_S = 2.0
TICK_S = 0.25
LOOK_S = 2.0  # of silence, after which the ranks' first collectives are compared
DUMP_S = 0.5  # for faulthandler to write
NOT_UNDERWAY = ("start", "build", "finish")  # phases in which every rank waits for every other
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # Slurm announces preemption by SIGTERM or SIGUSR1


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended. cause: the first real failure, if any."""

    exit_code: int
    cause: Failure | None = None
    note: str = ""
    step: int = 0
    failed_save_step: int = 0


def supervise(job: Job) -> Outcome:
    """Run the job's ranks to their end. No process of theirs outlives this call, or this process."""
    supervisor = Supervisor(job)
    with supervisor.signals():
        try:
            processes.preload(job)
            supervisor.start()
            return supervisor.watch()
        finally:
            supervisor.end_all()


class Supervisor:
    """The state of one supervision; `watch` is its loop."""

    def __init__(self, job: Job):
        self._job = job
        self._board = Board.fresh(job.plan.world)
        self._status = Status(job.directory)
        self._alive: dict[int, int] = {}  # rank -> pid
        self._pids: list[int] = []
        self._codes: dict[int, int] = {}
        self._failures: list[Failure] = []
        self._ended_by_us: set[int] = set()
        self._lost: set[int] = set()  # died, and the run goes on
        self._deadline = float("inf")  # when those still alive are ended
        self._signals: list[int] = []
        self._verdict: Outcome | None = None
        self._selector = selectors.DefaultSelector()
        self._next_status = 0.0
        self._next_look = 0.0
        self._oom_kills = _oom_kills()

    def start(self) -> None:
        """Start the ranks, unless a signal has come while the launcher was importing."""
        for key, _ in self._selector.select(0):
            for number in os.read(key.fd, 64):
                self._on_signal(number)
        if self._signals:
            self._verdict = self._verdict or Outcome(EXIT_TERMINATED, note="terminated before the first step")
            return
        self._pids = processes.start(self._job, self._board)
        for rank, pid in enumerate(self._pids):
            self._alive[rank] = pid
            if hasattr(os, "pidfd_open"):
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)

    def watch(self) -> Outcome:
        """Wait for all ranks; act on failures, hangs and signals."""
        while self._alive:
            for key, _ in self._selector.select(TICK_S if hasattr(os, "pidfd_open") else 0.05):
                if key.data == "signal":
                    for number in os.read(key.fd, 64):
                        self._on_signal(number)
                else:
                    self._reap(key.data, key)
            if not hasattr(os, "pidfd_open"):
                for rank in list(self._alive):
                    self._reap(rank, None)
            self._tick()
        return replace(self._outcome(), failed_save_step=self._board.failed_save())

    def end_all(self) -> None:
        """Kill and reap whatever is left."""
        for rank in list(self._alive):
            self._ended_by_us.add(rank)
            processes.kill(self._alive[rank], signal.SIGKILL)
        for rank, pid in list(self._alive.items()):
            processes.kill_group(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            del self._alive[rank]
        self._selector.close()

    @contextlib.contextmanager
    def signals(self):
        """Signals wake the loop. Outside the main thread (parallel Hydra launchers) they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # what nohup or a shell told us to ignore stays ignored
        numbers = [n for n in (signal.SIGINT, *_STOPS) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._selector.register(reader, selectors.EVENT_READ, "signal")
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _reap(self, rank: int, key: selectors.SelectorKey | None) -> None:
        pid = self._alive[rank]
        if key is None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        now = time.monotonic_ns()
        processes.kill_group(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del self._alive[rank]
        if key is not None:
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
        self._codes[rank] = code
        if code != self._board.returned(rank) and rank not in self._ended_by_us:
            if self._is_spare(rank, code):
                self._lose(rank, code, now)
            else:
                self._fail(rank, code, now)

    def _is_spare(self, rank: int, code: int) -> bool:
        """Can the run go on without this rank? One that said why it ends, or that others still wait for, is missed."""
        plan, underway = self._job.plan, self._board.read(rank).phase not in NOT_UNDERWAY
        spare = plan.data.spare_workers(plan.num_workers)
        is_worker = plan.role(rank) == "worker" and rank != 0
        ending = bool(self._failures or self._signals)
        return is_worker and code < 0 and underway and not ending and len(self._lost) < spare

    def _lose(self, rank: int, code: int, now: int) -> None:
        self._lost.add(rank)
        del self._codes[rank]
        what = failure.of_exit(rank, code, now, out_of_memory=_oom_kills() > self._oom_kills).what
        left = self._job.plan.num_workers - len(self._lost)
        print(f"warning: rank {rank} {what}; going on with {left} workers", file=sys.stderr, flush=True)

    def _fail(self, rank: int, code: int, now: int) -> None:
        said = failure.read(self._job.directory, rank) if code >= 0 else None
        if said is None:
            beat, told = self._board.read(rank), self._board.told(rank) if code >= 0 else None
            said = failure.of_exit(rank, code, now, out_of_memory=_oom_kills() > self._oom_kills)
            if told is not None:
                said = replace(said, exit_code=told[0], order=told[1], what=told[2])
            said = replace(said, step=beat.step, phase=beat.phase)
        if code == EXIT_INTERRUPTED and self._signals:
            return
        self._failures.append(replace(said, pid=self._pids[rank]))
        self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _on_signal(self, number: int) -> None:
        """First Ctrl-C: unwind. First SIGTERM: finish the step and save. A second signal of either: at once."""
        if number not in (signal.SIGINT, *_STOPS):
            return
        again, interrupt = bool(self._signals), number == signal.SIGINT
        self._signals.append(number)
        if again or interrupt:
            note = f"interrupted at step {self._step()}" if interrupt else f"terminated at step {self._step()}"
            code = EXIT_INTERRUPTED if interrupt else EXIT_TERMINATED
            self._verdict = Outcome(code, note=note)
        if again:
            self._deadline = 0.0
        elif interrupt:
            for pid in self._alive.values():
                processes.kill(pid, signal.SIGINT)
            self._deadline = min(self._deadline, time.monotonic() + INTERRUPT_S)
        else:
            self._board.request_stop()
            name = signal.Signals(number).name
            print(f"{name}: finishing the step, saving, leaving (a second signal ends at once)", file=sys.stderr)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._alive and not self._failures and self._verdict is None:
            self._look_for_hang()
            self._look_for_mismatch(now)
        if now >= self._deadline:
            for rank, pid in self._alive.items():
                self._ended_by_us.add(rank)
                processes.kill(pid, signal.SIGKILL)
        if now >= self._next_status:
            self._next_status = now + STATUS_EVERY_S
            self._status.failed_save_step = self._board.failed_save()
            self._status.running(self._step())

    def _look_for_hang(self) -> None:
        limit = self._job.config.timeout_s
        silent = [rank for rank in self._alive if self._board.read(rank).age_s > limit]
        if not silent:
            return
        stopped = {rank for rank, pid in self._alive.items() if stacks.is_stopped(pid)}
        pp_ranks = {
            rank: stacks.pp_rank(self._board.read(rank).step, dump, rank in stopped)
            for rank, dump in self._dump_stacks(stopped).items()
        }
        guilty, why = stacks.suspects(pp_ranks)
        rank = guilty[0] if guilty else silent[0]
        others = f" (with {', '.join(f'rank {r}' for r in guilty[1:4])})" if len(guilty) > 1 else ""
        why = why or "nothing tells the ranks apart: compare the stacks in logs/"
        beat = self._board.read(rank)
        what = f"hangs: no progress for {limit:g} s; {why}{others}; stacks of all ranks are in the logs"
        self._failures.append(
            Failure(rank, what, EXIT_HANG, time.monotonic_ns(), 0, self._pids[rank], beat.step, beat.phase)
        )
        self._deadline = 0.0

    def _look_for_mismatch(self, now: float) -> None:
        """Silent in the first steps: do the ranks wait in different collectives? Certain long before the timeout."""
        if now < self._next_look or all(self._board.read(rank).age_s < LOOK_S for rank in self._alive):
            return
        self._next_look = now + LOOK_S
        found = failure.of_mismatch(self._job.directory)
        if found is not None:
            beat = self._board.read(found.rank)
            pid = self._pids[found.rank]
            self._failures.append(replace(found, pid=pid, step=beat.step, phase=beat.phase))
            self._deadline = 0.0

    def _dump_stacks(self, stopped: set[int]) -> dict[int, str]:
        """Every live rank writes its threads' stacks into its log; what they wrote."""
        logs = {rank: log_path(self._job.directory, rank) for rank in self._alive}
        before = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
        for rank, pid in self._alive.items():
            if rank not in stopped:
                processes.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        dumps = {}
        for rank, path in logs.items():
            with open(path, errors="replace") as file:
                file.seek(before[rank])
                dumps[rank] = file.read()
        return dumps

    def _step(self) -> int:
        return max(self._board.read(rank).step for rank in range(self._job.plan.world))

    def _outcome(self) -> Outcome:
        step = self._step()
        if self._verdict is not None:
            return replace(self._verdict, step=step)
        if self._failures:
            cause = failure.explained(failure.root_cause(self._failures), self._job.directory)
            return Outcome(cause.exit_code, cause, step=step)
        codes = {code for code in self._codes.values() if code not in (EXIT_OK, EXIT_PREEMPTED)}
        assert NOT_RETURNED not in codes
        return Outcome(min(codes, default=max(self._codes.values())), step=step)


def _oom_kills() -> int:
    """How often the kernel has killed in our memory cgroup."""
    with contextlib.suppress(OSError), open("/sys/fs/cgroup/memory.events") as file:
        match = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        return int(match.group(1)) if match else 0
    return 0
