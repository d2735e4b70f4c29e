"""One rank from start to end: device, process group, worker, and an orderly exit or a recorded failure.

`python -m parallelrun.launch.ranks.rank` runs a rank that was started by exec: on CUDA, which does not survive a fork,
and if the launcher has threads."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_INTERRUPTED, EnvironmentProblem, Problem, cause_chain
from parallelrun.launch.failures import failure
from parallelrun.launch.host import position, preflight
from parallelrun.launch.host.heartbeat import HeartbeatFile, file_store
from parallelrun.launch.host.job import Job, RankSettings
from parallelrun.launch.host.output import redirect
from parallelrun.planner.contract.plan import Plan

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store


def serve(
    job: Job, settings: RankSettings, heartbeats: HeartbeatFile, connect: Callable[[], Store] | None = None
) -> int:
    """Run the worker of this rank. Return the exit code.

    Never raises: a failure is written to `errors/`, its traceback to stderr. connect: returns the store; None in a run
    of one rank, which has no process group.
    """
    try:
        code = _work(job, settings, heartbeats, connect)
        heartbeats.set_returned(settings.rank, code)
        return code
    except BaseException as error:
        # Whatever fails because of the interrupt, such as a lock that it kept from being taken, is no failure.
        if any(isinstance(link, KeyboardInterrupt) for link in cause_chain(error)):
            return EXIT_INTERRUPTED
        if isinstance(error, SystemExit) and error.code in (0, None):
            error = RuntimeError("the worker called sys.exit()")
        now = time.monotonic_ns()
        with contextlib.suppress(OSError, ValueError):  # the disk of the log may be full
            traceback.print_exception(error)
        own = failure.of_exception(error, settings.rank, now, single_rank=connect is None)
        failure.record(job.directory, heartbeats, own.at(heartbeats.read(settings.rank), os.getpid()))
        return own.exit_code


def _work(job: Job, settings: RankSettings, heartbeats: HeartbeatFile, connect: Callable[[], Store] | None) -> int:
    import numpy
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    rank, world = settings.rank, job.plan.world
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):  # forked ranks have the launcher's generators
        seed((job.config.seed * 1_000_003 + rank) % 2**32)
    device = _device(job.plan, settings)
    store = connect() if connect is not None else None
    if store is not None:
        _join(job, rank, store)
    context = WorkerContext(
        rank=rank,
        world=world,
        local_rank=settings.local_rank,
        device=device,
        directory=job.directory,
        heartbeat=partial(heartbeats.beat, rank),
        stop_requested=heartbeats.stop_requested,
        save_failed=heartbeats.set_failed_save,
        console_owner=rank == 0,
        rank_died=partial(_leave_for, store, world),
        report_pace=partial(heartbeats.set_pace, rank),
        prepared=job.prepared,
    )
    code: int = find_worker(job.worker)(job.config, job.plan, context)
    if store is not None:
        heartbeats.beat(rank, heartbeats.read(rank).step, "finish")
        _leave(store, rank, world)
    return code


def find_worker(name: str) -> Any:
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _device(plan: Plan, settings: RankSettings) -> torch.device:
    """Return the CPU or this rank's GPU. Servers run on the CPU."""
    import torch

    if plan.device != "cuda" or plan.role(settings.rank) == "server":
        return torch.device("cpu")
    device = torch.device("cuda", preflight.gpu_index(settings.local_rank, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def _join(job: Job, rank: int, store: Store) -> None:
    """Create the process group of the run. Its timeout is the last resort, later than the launcher's hang detection.

    With GPUs it uses gloo and NCCL. With servers, which may have no GPU, it uses gloo only: the workers have an NCCL
    group of their own. Raises EnvironmentProblem if backend=shm is asked for and impossible.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from parallelrun.distributed import shared_memory

    requested = job.config.backend
    if job.plan.device == "cuda":
        backend = "gloo" if job.plan.servers else "cpu:gloo,cuda:nccl"
    else:
        backend = shared_memory.register() if requested != "gloo" else requested
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=job.plan.world,
        timeout=timedelta(seconds=2 * job.config.timeout_s + 60),
    )
    if requested == backend == shared_memory.BACKEND and shared_memory.carrier(dist.group.WORLD) == "gloo":
        message = f"backend=shm is impossible: {shared_memory.refusal(dist.group.WORLD)}"
        raise EnvironmentProblem(Problem(message, "backend", suggestion="backend=auto"))


def _leave(store: Store, rank: int, world: int) -> None:
    """Wait until all ranks have finished, then destroy the process group. Rank 0, which serves the store, exits last.

    The ranks wait in the store, because a collective could match one that a rank has skipped.
    """
    import torch.distributed as dist

    from parallelrun.distributed import shared_memory

    shared_memory.finish()
    _count_finished(store, world)
    store.wait(["all finished"], timedelta(days=1))  # hang detection ends this if a rank does not finish
    dist.destroy_process_group()
    store.add("exited", 1)
    deadline = time.monotonic() + 5
    while rank == 0 and store.add("exited", 0) < world and time.monotonic() < deadline:
        time.sleep(0.002)


def _leave_for(store: Store | None, world: int, dead_rank: int) -> None:
    """Count a dead rank as finished, so that the others do not wait for it in `_leave`."""
    assert store is not None, f"a run of one rank has no rank {dead_rank} that could die"
    _count_finished(store, world)
    store.add("exited", 1)


def _count_finished(store: Store, world: int) -> None:
    if store.add("finished", 1) == world:
        store.set("all finished", "yes")


def take_signals(heartbeats: HeartbeatFile, stops: Sequence[int] = (signal.SIGTERM,)) -> None:
    """Let the signals `stops` ask all ranks of the host to stop after their step, and SIGINT interrupt at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # rank 0 may write to the terminal from its own process group
    for number in stops:
        signal.signal(number, lambda *_: heartbeats.request_stop())


def end(code: int) -> NoReturn:
    """Exit without exit handlers, in which the threads of a failed process group would abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def leave_with_parent(parent: int) -> None:
    """End this process when its launcher ends, in whatever way."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(
    config_file: str, folder: str, worker: str, rank: int, world: int, parent: int, heartbeats: int, store: int
) -> NoReturn:
    """Run an exec'd rank. heartbeats, store: inherited descriptors."""
    leave_with_parent(parent)
    heartbeat_file = HeartbeatFile(world, heartbeats)
    take_signals(heartbeat_file)
    position.tell_when_asked(Path(folder), rank)
    redirect(Path(folder), rank)
    from parallelrun.planner.resolve.freeze import load_frozen
    from parallelrun.planner.resolve.resolve_config import resolve

    config = load_frozen(Path(config_file).read_text())
    job = Job(config, resolve(config), Path(folder), worker)
    if job.plan.world != world:
        message = f"{config_file} describes {job.plan.world} ranks, but the launcher started {world}"
        raise EnvironmentProblem(Problem(message, "config.yaml"))
    connect = partial(file_store, store) if world > 1 else None
    end(serve(job, RankSettings(rank, rank), heartbeat_file, connect))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
