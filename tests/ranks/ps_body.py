"""Run the real workers and servers of a parameter server on test ranks, each run in its own directory."""

from __future__ import annotations

import errno
import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallelrun.base.context import WorkerContext
from parallelrun.checkpoint import storage
from parallelrun.checkpoint.background import HostMemory
from parallelrun.config.schema.run_schema import Config
from parallelrun.planner.contract.plan import Plan
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.strategies.data.ps import apply_log, connections, runtime, server, shards, worker
from parallelrun.strategies.data.ps.apply_log import AppliedUpdate, DroppedPush
from parallelrun.strategies.data.ps.client import ShardBuffers
from parallelrun.strategies.data.ps.store import ShardStore
from tests.peak_bytes import PeakBytes
from tests.plans import tiny_config
from tests.pool import run_ranks

PS = {
    "strategy.data.kind": "ps",
    "strategy.name": "ps",
    "dp": 3,
    "strategy.data.shard_min_kb": 0.1,
    "eval.every": 0,
    "global_batch": 12,
}


def ps_config(overrides: dict[str, Any], verb: str = "run") -> Config:
    """The tiny config under a parameter server."""
    config = tiny_config({**PS, **overrides})
    config.verb = verb
    return config


def ps_plan(overrides: dict[str, Any]) -> Plan:
    return resolve(ps_config(overrides))


def run(directory: Path, overrides: dict[str, Any], verb: str = "run", change: str = "", timeout: float = 60.0) -> None:
    """Run the plan's ranks to their end. change: a function of this module, called on every rank first."""
    directory.mkdir(parents=True, exist_ok=True)
    plan = ps_plan(overrides)
    run_ranks(plan.world, body, str(directory), overrides, verb, change, timeout=timeout)


def body(directory: str, overrides: dict[str, Any], verb: str, change: str) -> int:
    """One rank."""
    torch.set_num_threads(1)
    config = ps_config(overrides, verb)
    if change:
        globals()[change](config)
    rank = dist.get_rank()
    context = WorkerContext(
        rank, dist.get_world_size(), rank, torch.device("cpu"), Path(directory), lambda step, phase: None,
        lambda: False, lambda step: None, False,
    )  # fmt: skip
    return runtime.run(config, resolve(config), context)


# changes of the program, made on every rank before the run


def add_instead_of_mean(config: Config) -> None:
    """Planted bug: servers sum the gradients instead of averaging them."""
    original = ShardStore.mean

    def mean(self, pushes, weights) -> None:
        original(self, pushes, weights)
        self.gradient.mul_(len(pushes))

    ShardStore.mean = mean


def pull_the_shard_of_another_rank(config: Config) -> None:
    """Planted bug: the servers send rank 1 the part of the weights of rank 0, where both have equal shapes."""

    def pieces(plan, rank, own):
        pushed, pulled = shards.pieces(plan, rank, own)
        others = {piece.shard: piece for piece in shards.pieces(plan, 0, own)[1]} if rank == 1 else {}
        return pushed, [
            replace(piece, box=others[piece.shard].box, part=others[piece.shard].part)
            if piece.shard in others and others[piece.shard].shape == piece.shape
            else piece
            for piece in pulled
        ]

    connections.pieces = pieces


def push_norms_from_every_rank(config: Config) -> None:
    """Planted bug: parameters that are replicated over tp are pushed by every rank of a worker."""
    shards.owns = lambda layout, shape, coordinate: True


def count_every_rank_as_a_worker(config: Config) -> None:
    """Planted bug: the request of each rank is done for itself, so that a push is several updates."""
    connections.WorkerConnections.request = lambda self: self.requests.popitem()[1]


def worker_1_keeps_its_weights(config: Config) -> None:
    """Planted bug: worker 1 copies only its first pull into its module."""
    if dist.get_rank() == 1:
        calls = []

        def unpack(self) -> None:
            calls.append(1)
            if len(calls) == 1:
                original(self)

        original, ShardBuffers.unpack = ShardBuffers.unpack, unpack


def worker_2_ends_early(config: Config) -> None:
    if dist.get_rank() == 2:
        config.steps //= 4


def worker_2_stalls_once(config: Config) -> None:
    """Every step takes 40 ms, except one of worker 2 that takes 400 ms."""
    worker.pause_before_push = lambda settings, index, clock: time.sleep(0.4 if (index, clock) == (2, 6) else 0.04)


def worker_2_is_slow(config: Config) -> None:
    """Every step takes 15 ms, and 60 ms on worker 2."""
    worker.pause_before_push = lambda settings, index, clock: time.sleep(0.06 if index == 2 else 0.015)


def slow_copies(config: Config) -> None:
    """Checkpoints are copied long after the workers have gone on."""
    copy = HostMemory.copy

    def late(self, parts, after):
        time.sleep(0.2)
        return copy(self, parts, after)

    HostMemory.copy = late


def no_room_for_step_4(config: Config) -> None:
    """The disk of the last rank, a server, is full when the checkpoint of step 4 is written."""
    write = storage.write_safetensors

    def full(path, *rest):
        if ".step_4." in str(path) and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *rest)

    storage.write_safetensors = full


def record_peaks(config: Config) -> None:
    """Every rank writes the most bytes it held: a worker in its second step, a server from the first request on."""
    live = PeakBytes().__enter__()
    step, serve, attend = worker.Worker.step, server.Server.serve, server.Server._attend

    def measured_step(self, clock: int, stop: bool):
        gc.collect()
        live.restart()
        found = step(self, clock, stop)
        if clock == 2:
            _write_peak(self.context, live.peak)
        return found

    def measured_serve(self) -> None:
        gc.collect()
        live.restart()
        serve(self)
        _write_peak(self._context, live.peak)

    def measured_attend(self, connection) -> None:
        with live:  # a mode is of one thread
            attend(self, connection)

    worker.Worker.step, server.Server.serve, server.Server._attend = measured_step, measured_serve, measured_attend


def _write_peak(context: WorkerContext, num_bytes: int) -> None:
    (context.directory / f"peak_{context.rank}").write_text(str(num_bytes))


# files of a finished run


def updates(directory: Path, server: int = 0) -> list[AppliedUpdate]:
    return [row for row in apply_log.read_log(directory) if isinstance(row, AppliedUpdate) and row.server == server]


def drops(directory: Path) -> list[DroppedPush]:
    return [row for row in apply_log.read_log(directory) if isinstance(row, DroppedPush)]


def document(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
