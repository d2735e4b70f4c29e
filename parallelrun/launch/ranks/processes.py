"""Starting the ranks of this host: by fork from a launcher that has imported torch but not used it, else by exec."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from parallelrun.base import registry
from parallelrun.config.schema.run_schema import Config
from parallelrun.launch.host import emulation, position
from parallelrun.launch.host.emulation import Namespaces
from parallelrun.launch.host.environment import for_rank, num_cores, threads_per_rank
from parallelrun.launch.host.heartbeat import HeartbeatFile, anonymous_file, file_store
from parallelrun.launch.host.job import WORKER, Job, RankSettings
from parallelrun.launch.host.os_process import own_group
from parallelrun.launch.host.output import open_log, redirect
from parallelrun.launch.ranks import rank as ranks
from parallelrun.planner.contract.plan import Plan

FORK, EXEC = "fork", "exec"
_PRELOADED = (
    "numpy.random",
    "torch.distributed",
    "parallelrun.checkpoint",
    "parallelrun.report.runs.final_panel",
    "parallelrun.distributed.shared_memory.joining",
    "parallelrun.training.loop.bench",
    "parallelrun.training.loop.training_loop",
    "parallelrun.training.metrics.recorder",
    "parallelrun.training.verify.run",
    "parallelrun.distributed.torch_private:import_profiler",
)


# jemalloc prepares its own thread for a fork. pyarrow has it, which Optuna imports with pandas
_SAFE_THREADS = ("jemalloc_bg_thd", "")


def preload(job: Job) -> None:
    """Import the modules of the ranks once in the launcher, if the ranks are forked."""
    import_all(modules(job.config, job.plan, job.worker))


def modules(config: Config, plan: Plan, worker: str = WORKER) -> list[str]:
    """Return what forked ranks need, for `import_all`; nothing if the ranks of this plan are not forked."""
    if plan.device == "cuda":
        return []
    names = [worker.partition(":")[0], *_PRELOADED]
    if plan.runs_again or config.compile:
        names.append("parallelrun.distributed.torch_private:import_compiler")
    names += [registry.path("models", config.model.name, "network"), registry.path("datasets", config.dataset.name)]
    used = {axis: getattr(plan, axis) for axis in ("data", "tensor", "pipeline", "context", "expert")}
    return names + [
        registry.path("strategies", f"{axis}.{strategy.kind}", "runtime") for axis, strategy in used.items() if strategy
    ]


def import_all(names: Sequence[str]) -> None:
    """Import modules, or call `module:function`, up to the first that fails: it fails again in the ranks, which log it.

    The garbage collector, which takes a seventh of the time of these imports, is paused, and leaves alone what was
    imported until `start` has started the ranks.
    """
    if not names:
        return
    was_on = gc.isenabled()
    gc.disable()
    with contextlib.suppress(Exception):
        for name in names:
            module, _, function = name.partition(":")
            imported = import_module(module)
            if function:
                getattr(imported, function)()
    gc.freeze()
    if was_on:
        gc.enable()


def prepared(job: Job) -> Job:
    """Return the job with the object that its worker's module prepares once for all forked ranks. An error is ignored:
    the ranks get it again, and log it."""
    if job.plan.device != "cuda":
        with contextlib.suppress(Exception):
            make = getattr(import_module(job.worker.partition(":")[0]), "prepare", None)
            return replace(job, prepared=make(job.config, job.plan)) if make else job
    return job


def method_for(plan: Plan) -> str:
    """Return `exec` if a fork would be unsafe (CUDA, threads that do not survive a fork), else `fork`.

    Such threads are Python's (parallel Hydra launchers) and torch's compute threads (an earlier inline run). numpy's
    OpenBLAS has threads, too, but ends them before a fork. So if there are threads, one fork shows which ones remain.
    """
    if plan.device == "cuda":
        return EXEC
    if num_threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return FORK if num_threads() == 1 else EXEC


def num_threads() -> int:
    """Return the number of threads of this process, native ones included, without those that a fork is safe
    with."""
    return sum(_comm(thread) not in _SAFE_THREADS for thread in os.listdir("/proc/self/task"))


def _comm(thread: str) -> str:
    """Return the name of a thread of this process; that of a thread that has just ended is empty."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    return ""


def start(job: Job, heartbeats: HeartbeatFile) -> Iterator[int]:
    """Start every rank and yield its pid."""
    job = prepared(job)
    start_rank = _fork if method_for(job.plan) == FORK else _exec
    threads = threads_per_rank(os.environ, job.plan.world)
    with emulation.namespaces(job.config, job.plan) as hosts:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        store = anonymous_file("store")
        gc.freeze()
        try:
            for rank in range(job.plan.world):
                yield start_rank(job, RankSettings(rank, rank, threads), heartbeats, store, hosts)
        finally:
            gc.unfreeze()
            os.close(store)


def fork(run: Callable[[], int]) -> int:
    """Start a process that exits with the code of `run`, has its own process group and ends with this process. Return
    its pid.

    Until `run` has set its signal handlers and calls `unblock_signals`, a signal would run those of this process.
    """
    parent = os.getpid()
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        own_group(pid)
        return pid
    code = 1
    try:
        ranks.leave_with_parent(parent)
        own_group(0)
        signal.set_wakeup_fd(-1)
        code = run()
    finally:
        ranks.end(code)


def unblock_signals() -> None:
    """Accept signals again, in a process that `fork` has started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def take_turns(num_ranks: int) -> None:
    """If ranks share cores, let this one not interrupt another when it is woken: each interruption empties caches."""
    if num_ranks > num_cores():
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _fork(job: Job, settings: RankSettings, heartbeats: HeartbeatFile, store: int, hosts: Namespaces | None) -> int:
    rank, world = settings.rank, job.plan.world

    def run() -> int:
        for number in (signal.SIGUSR2, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        take_turns(world)
        position.tell_when_asked(job.directory, rank)
        redirect(job.directory, rank)
        ranks.take_signals(heartbeats)
        unblock_signals()
        environment = for_rank(os.environ, rank, world, settings.threads)
        if hosts is not None:
            environment |= hosts.variables(rank)
            hosts.enter(rank)
        os.environ.clear()
        os.environ.update(environment)
        connect = partial(file_store, store) if world > 1 else None
        return ranks.serve(job, settings, heartbeats, connect)

    return fork(run)


def _exec(job: Job, settings: RankSettings, heartbeats: HeartbeatFile, store: int, hosts: Namespaces | None) -> int:
    rank, world, serves = settings.rank, job.plan.world, settings.rank == 0
    order = {
        "config_file": os.fspath(job.config_file),
        "folder": os.fspath(job.directory),
        "worker": job.worker,
        "rank": rank,
        "world": world,
        "parent": os.getpid(),
        "heartbeats": heartbeats.descriptor,
        "store": store,
    }
    environment = for_rank(os.environ, rank, world, settings.threads)
    environment |= hosts.variables(rank) if hosts else {}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    log = open_log(job.directory, rank)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "parallelrun.launch.ranks.rank", json.dumps(order)],
            pass_fds=[heartbeats.descriptor, store],
            stdin=subprocess.DEVNULL,
            stdout=None if serves else log,
            stderr=log,
            env=environment,
            preexec_fn=partial(hosts.enter, rank) if hosts else None,
        )
    finally:
        os.close(log)
    process.returncode = 0  # the supervisor reaps the process, not this object
    own_group(process.pid)
    return process.pid
