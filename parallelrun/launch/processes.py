"""Starting the ranks of this host: by fork from a launcher that has imported torch and run nothing, else by exec."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parallelrun import registry
from parallelrun.config.schema import Config
from parallelrun.launch import rank as ranks
from parallelrun.launch.board import Board
from parallelrun.launch.environment import for_rank, threads_per_rank
from parallelrun.launch.output import open_log, redirect
from parallelrun.plan.structure import Plan

FORK, EXEC = "fork", "exec"
_BACKLOG = 4096  # all ranks connect at once


@dataclass(frozen=True)
class Job:
    """What is launched: the run, its directory (config.yaml is in it), and the worker door."""

    config: Config
    plan: Plan
    directory: Path
    worker: str = ranks.WORKER
    method: str = ""  # fork | exec; empty: whichever fits


def preload(job: Job) -> None:
    """Import what every rank will need, once, in the launcher, unless the ranks are exec'd and do so themselves.

    What cannot be imported fails in the ranks, logged.
    """
    plan, half = job.plan, "runtime"
    if job.method == EXEC or not _forks(plan):
        return
    with contextlib.suppress(Exception):
        ranks.find_worker(job.worker)
        import torch.distributed  # noqa: F401

        import parallelrun.checkpoint
        import parallelrun.report.run
        import parallelrun.train.bench
        import parallelrun.train.loop
        import parallelrun.train.recorder
        import parallelrun.verify.run  # noqa: F401

        registry.load("models", job.config.model.name, "network")
        registry.load("datasets", job.config.dataset.name)
        for axis, kind in (("data", plan.data.kind), ("tensor", plan.tensor.kind), ("pipeline", plan.pipeline.kind)):
            registry.load("strategies", f"{axis}.{kind}", half)


def method_for(plan: Plan) -> str:
    """fork, unless a fork would be unsafe: CUDA, macOS, or threads in this process that do not survive one.

    Those are Python's (parallel Hydra launchers) and torch's compute threads (an earlier inline run). numpy's OpenBLAS
    has threads from its import on, but ends them before a fork: so a first fork tells who is left.
    """
    if not _forks(plan):
        return EXEC
    if num_threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return FORK if num_threads() == 1 else EXEC


def _forks(plan: Plan) -> bool:
    return plan.device != "cuda" and sys.platform == "linux"


def num_threads() -> int:
    """Threads of this process, native ones included (Linux)."""
    return len(os.listdir("/proc/self/task"))


def start(job: Job, board: Board) -> list[int]:
    """Start every rank; return their pids. The store's socket is bound to 127.0.0.1 before the first one exists."""
    plan = job.plan
    method = job.method or method_for(plan)
    threads = threads_per_rank(os.environ, plan.world)
    pids: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listener:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        gc.freeze()
        try:
            for rank in range(plan.world):
                place = ranks.Place(
                    rank, plan.world, rank, rank, job.directory, job.worker, threads, keeps_terminal=rank == 0
                )
                pids.append((_fork if method == FORK else _exec)(job, place, board, listener))
        except BaseException:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        finally:
            gc.unfreeze()
    return pids


def _fork(job: Job, place: ranks.Place, board: Board, listener: socket.socket) -> int:
    parent = os.getpid()
    # a signal that comes before the child has its own handlers would run the launcher's
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        _own_group(pid)
        return pid
    code = 1
    try:
        ranks.leave_with_parent(parent)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        redirect(job.directory, place.rank, place.keeps_terminal)
        ranks.take_signals(board)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        environment = for_rank(os.environ, place.rank, place.world, place.threads)
        os.environ.clear()
        os.environ.update(environment)
        port = listener.getsockname()[1]
        descriptor = listener.detach() if place.rank == 0 else None
        if descriptor is None:
            listener.close()
        connect = partial(ranks.local_store, place.world, port, descriptor) if place.world > 1 else None
        code = ranks.serve(place, job.config, job.plan, board, connect)
    finally:
        ranks.end(code)
    raise AssertionError("unreachable")


def _exec(job: Job, place: ranks.Place, board: Board, listener: socket.socket) -> int:
    serves = place.rank == 0
    order = ranks.ExecOrder(
        place, os.getpid(), board.descriptor, listener.getsockname()[1], listener.fileno() if serves else None
    )
    environment = for_rank(os.environ, place.rank, place.world, place.threads)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    log = open_log(job.directory, place.rank)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "parallelrun.launch.rank", order.to_json()],
            pass_fds=[board.descriptor, *([listener.fileno()] if serves else [])],
            stdin=subprocess.DEVNULL,
            stdout=None if serves else log,
            stderr=log,
            env=environment,
        )
    finally:
        os.close(log)
    process.returncode = 0  # the supervisor reaps it, not this object
    _own_group(process.pid)
    return process.pid


def _own_group(pid: int) -> None:
    """A process group of its own: Ctrl-C reaches the launcher alone, and all that a rank started can be ended."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def kill(pid: int, number: int) -> None:
    """Send a signal to a rank that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(pid: int) -> None:
    """End what a rank has started. Only before the rank is reaped: until then its number is not given away."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
