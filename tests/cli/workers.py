"""Small workers for launch tests, in place of training: `worker="tests.cli.workers:..."`. Each meets its ranks in an
all-reduce per step, as training does. What a worker should do comes by environment variable PARALLELRUN_TEST."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.base.errors import EXIT_OK, EXIT_PREEMPTED, NumericsError, Problem
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan

GROUPS: list = []  # of two ranks each, for `elsewhere`


def wish() -> dict:
    """What the test asks for."""
    return json.loads(os.environ.get("PARALLELRUN_TEST", "{}"))


def train(config: Config, plan: Plan, context: WorkerContext) -> int:
    """`wish()["steps"]` steps of an all-reduce; at `step` the rank `rank` does `do`."""
    wanted = {"steps": 5, "pause": 0.01, "rank": -1, "step": 3, **wish()}
    print(f"rank {context.rank} speaks")
    note(context, "started", os.getpid())
    if wanted.get("do") == "elsewhere":
        GROUPS[:] = [dist.new_group([rank, rank + 1]) for rank in range(0, context.world, 2)]
    for step in range(1, wanted["steps"] + 1):
        context.heartbeat(step, "step")
        note(context, "at", step)
        if step == wanted["step"] and context.rank == wanted["rank"]:
            misbehave(wanted["do"])
        stop = torch.tensor([float(context.stop_requested())])
        if wanted.get("skips") != [context.rank, step] and context.world > 1:
            dist.all_reduce(stop)
        time.sleep(wanted["pause"])
        if stop.item():
            (context.directory / "checkpoints" / f"step_{step}").mkdir(parents=True, exist_ok=True)
            return EXIT_PREEMPTED
    return EXIT_OK


def note(context: WorkerContext, what: str, value: int) -> None:
    """Leave a fact of this rank for the test to read."""
    (context.directory / f"{what}_{context.rank}").write_text(str(value))


def misbehave(how: str) -> None:
    """What the test asked of this rank."""
    if how == "raise":
        raise ValueError("the culprit speaks")
    if how == "numerics":
        raise NumericsError(Problem("loss is nan", where="optimizer.lr", command="lower optimizer.lr"))
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        raise SystemExit(0)
    if how == "sleep":
        time.sleep(1000)
    if how == "elsewhere":  # another collective, in the group of this rank and its neighbour
        dist.all_gather(list(torch.zeros(2, 3).unbind()), torch.zeros(3), group=GROUPS[dist.get_rank() // 2])
    if how == "ignore signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
    if how == "hold the GIL":
        while True:  # a signal ends the sleep
            ctypes.PyDLL(None).sleep(1000)
    if how == "segfault":
        ctypes.string_at(0)
    if how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "abort":
        os.abort()
    if how == "shape":
        dist.all_reduce(torch.zeros(7))


def environment(config: Config, plan: Plan, context: WorkerContext) -> int:
    """Rank by rank: variables, threads, random numbers, addresses that are listened on."""
    facts = {
        "environ": dict(os.environ),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1).item(),
        "pid": os.getpid(),
        "group": os.getpgid(0),
    }
    (context.directory / f"facts_{context.rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    return EXIT_OK


def fail_in_save(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The real training, in which rank `rank` raises `do` in the place of writing its file of a checkpoint."""
    from parallelrun.checkpoint import storage
    from parallelrun.launch.ranks import worker

    wanted = {"rank": 3, "do": "ValueError", **wish()}
    errors = {
        "ValueError": ValueError("injected into save"),
        "OSError without a number": OSError("injected into save"),
        "AssertionError": AssertionError("injected into save"),
        "full disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rank.safetensors"),
    }

    def fail(*_: object) -> None:
        raise errors[wanted["do"]]

    if context.rank == wanted["rank"]:
        storage.write_safetensors = fail
    return worker.run(config, plan, context)


def on_a_full_disk(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The real training, for whose metrics.jsonl the disk has no room: before step 4 (`returns`), at the end (`kept
    back`, the room that the run keeps back) or never (`never`, nor for what went wrong)."""
    from parallelrun.base import reserve
    from parallelrun.launch.failures import failure
    from parallelrun.launch.ranks import worker

    wanted, metrics = wish()["room"], context.directory / "metrics.jsonl"
    if context.rank:
        return worker.run(config, plan, context)
    metrics.symlink_to("/dev/full")
    released, heartbeat = reserve.release, context.heartbeat

    def release(directory: Path, *names: str) -> None:
        if wanted == "kept back" and reserve.RECORDS in names and (directory / reserve.RECORDS).exists():
            metrics.unlink()
        released(directory, *names)

    def beat(step: int, phase: str) -> None:
        if wanted == "returns" and (step, phase) == (4, "step"):
            metrics.unlink()
        heartbeat(step, phase)

    reserve.release = release
    if wanted == "never":
        failure.write_failure = lambda *_: open("/dev/full", "w", buffering=1).write("no room\n")  # noqa: SIM115
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)  # the log
    return worker.run(config, plan, replace(context, heartbeat=beat))


def slowly(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The real training with a pause in each step, so that it leaves the cores to the test that waits for it."""
    from parallelrun.launch.ranks import worker

    def beat(step: int, phase: str) -> None:
        if phase == "step":
            time.sleep(0.05)
        context.heartbeat(step, phase)

    return worker.run(config, plan, replace(context, heartbeat=beat))


def differ(config: Config, plan: Plan, context: WorkerContext) -> int:
    """The real training, in which rank `rank` sends its `number`-th all-reduce of `purpose` otherwise: `do`."""
    from parallelrun.distributed import comm
    from parallelrun.launch.ranks import worker

    wanted, real, seen, kept = {"rank": 3, "number": 3, **wish()}, comm.all_reduce, [0], []

    def otherwise(tensor, group, purpose, op="sum", async_op=False):
        seen[0] += purpose == wanted["purpose"]
        if purpose != wanted["purpose"] or seen[0] != wanted["number"]:
            work = real(tensor, group, purpose, op, async_op)
            while kept:
                real(*kept.pop())
            return work
        if wanted["do"] == "skip":
            return None
        if wanted["do"] == "late":
            kept.append((tensor, group, purpose, op))
            return None
        if wanted["do"] == "double":
            real(tensor.clone(), group, purpose, op)
        return real(tensor, group, purpose, op, async_op)

    note(context, "started", os.getpid())
    if context.rank == wanted["rank"]:
        comm.all_reduce = otherwise
    return worker.run(config, plan, context)
