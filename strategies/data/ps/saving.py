"""Checkpoints of a parameter server: written and read by the servers, under one-device names, for any plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parallelrun import checkpoint
from parallelrun.checkpoint.find import FOLDER
from parallelrun.checkpoint.index import Index, check_model, describe_plan, state_key, weight_key
from parallelrun.checkpoint.planners import LocalPart, PartLoadPlanner, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from parallelrun.checkpoint.store import one_process_is_fine, raise_for_user
from parallelrun.config.schema import Config
from parallelrun.context import WorkerContext
from parallelrun.data import open_dataset
from parallelrun.errors import SaveFailed
from parallelrun.plan.structure import Plan
from parallelrun.train.checkpointing import MAX_FAILED_SAVES, check_batch
from parallelrun.train.scaler import LossScaler

from .store import ShardStore


class Saver:
    """A server's saves: what a failed one means. All servers decide alike. steps: those whose save has failed."""

    def __init__(self, context: WorkerContext):
        self._context = context
        self.failed_steps: list[int] = []
        self._in_a_row = 0

    def save(self, clocks: Mapping[int, int], last: bool, write: Callable[[], None]) -> bool:
        """`write`; False where that failed and is tried again later. Raises SaveFailed when it was the last chance, or
        the second failure in a row."""
        step = min(clocks.values())
        self._context.heartbeat(step, "save")
        try:
            write()
        except SaveFailed:
            self.failed_steps.append(step)
            self._in_a_row += 1
            self._context.save_failed(step)
            if last or self._in_a_row == MAX_FAILED_SAVES:
                raise
            return False
        self._in_a_row = 0
        return True


def save(
    store: ShardStore,
    config: Config,
    plan: Plan,
    clocks: Mapping[int, int],
    directory: Path,
    server: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Write `checkpoints/step_<least clock>`. Collective over the servers. Raises SaveFailed on all of them alike.

    clocks: of the live workers. No push is on its way: all of those are in a meeting.
    """
    step = min(clocks.values())
    extra = {
        "step": step,
        "samples": step * plan.batch.global_batch,
        "global_batch": plan.batch.global_batch,
        "seed": config.seed,
        "dataset": {"name": config.dataset.name, "fingerprint": open_dataset(config, plan.spec).fingerprint},
        "scaler": LossScaler(config.precision, plan.precision.scaled).state(),
        "clocks": [clocks[worker] for worker in sorted(clocks)],
    }
    folder = directory / FOLDER
    writer = SafetensorsWriter(folder, step, plan.optimizer, describe_plan(plan), extra)
    planner = PartSavePlanner(_parts(store), [weight_key(name) for name in plan.spec.parameters])
    try:
        with one_process_is_fine():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        writer.discard()
        raise_for_user(error, f"the checkpoint of step {step} could not be written to {folder}", server, saving=True)
    checkpoint.keep_last(folder, config.checkpoint.keep, SimpleNamespace(rank=server))


def load(store: ShardStore, config: Config, plan: Plan, together: bool) -> dict[int, int]:
    """Fill the store from `config.resume`, if given; the clock that each worker goes on from. Raises CheckpointError.

    together: one update is made of all workers' pushes, so that all are at one clock. Otherwise each goes on from its
    own, if the checkpoint is of as many workers, else all from the least.
    """
    workers = range(plan.num_workers)
    if not config.resume:
        return dict.fromkeys(workers, 0)
    path = checkpoint.resolve_resume(config.resume, config.runs)
    reader = SafetensorsReader(path)
    try:
        check_model(reader.index, plan, path)
        parts, states = _parts_to_fill(store, reader.index)
        with one_process_is_fine():
            dcp.load({}, storage_reader=reader, planner=PartLoadPlanner(parts), no_dist=True)
    except dcp.CheckpointException as error:
        raise_for_user(error, f"{path} could not be loaded", 0, saving=False)
    for name, state in states.items():
        if state:
            store.optimizer.load_state(name, state)
    extra = dict(reader.index.extra)
    check_batch(extra, plan, path)
    step, clocks = int(extra["step"]), extra.get("clocks", [])
    store.version = step if together else 0
    return dict(enumerate(clocks)) if len(clocks) == len(workers) and not together else dict.fromkeys(workers, step)


def _parts(store: ShardStore) -> list[LocalPart]:
    """What this server writes: its rows of weights and state, and (server 0) what is frozen."""
    parts = [
        LocalPart(weight_key(name), tensor, tuple(tensor.shape), (0,) * tensor.dim())
        for name, tensor in store.frozen.items()
    ]
    for shard, parameter in zip(store.shards, store.parameters):
        shape = tuple(parameter.spec.shape)
        offsets = (shard.start, *(0 for _ in shape[1:])) if shape else ()
        parts.append(LocalPart(weight_key(shard.name), parameter.tensor, shape, offsets))
        for kind, value in store.optimizer.state(parameter.name).items():
            key = state_key(kind, shard.name)
            if value.dim():
                parts.append(LocalPart(key, value, shape, offsets))
            elif shard.start == 0:
                parts.append(LocalPart(key, value, (), ()))
    return parts


def _parts_to_fill(store: ShardStore, index: Index) -> tuple[list[LocalPart], dict[str, dict[str, torch.Tensor]]]:
    """(the parts to read, the optimizer's state by the store's parameter names, which some of them fill)."""
    parts = [
        LocalPart(weight_key(name), tensor, tuple(tensor.shape), (0,) * tensor.dim())
        for name, tensor in store.frozen.items()
    ]
    states: dict[str, dict[str, torch.Tensor]] = {}
    for shard, parameter in zip(store.shards, store.parameters):
        shape = tuple(parameter.spec.shape)
        offsets = (shard.start, *(0 for _ in shape[1:])) if shape else ()
        parts.append(LocalPart(weight_key(shard.name), parameter.tensor, shape, offsets))
        state: dict[str, Any] = states.setdefault(parameter.name, {})
        for kind in index.state_kinds.get(shard.name, ()):
            stored = index.tensors[state_key(kind, shard.name)]
            dtype = getattr(torch, stored.dtype)
            if stored.shape:
                state[kind] = torch.zeros_like(parameter.tensor, dtype=dtype)
                parts.append(LocalPart(state_key(kind, shard.name), state[kind], shape, offsets))
            else:
                state[kind] = torch.zeros((), dtype=dtype)
                parts.append(LocalPart(state_key(kind, shard.name), state[kind], (), ()))
    return parts, states
