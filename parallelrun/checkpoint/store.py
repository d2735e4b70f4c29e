"""Saves and loads a training's weights and optimizer state under any plan.

The weights of independent data replicas (local SGD, DiLoCo) differ. Their checkpoint has the mean over replicas under
the one-device names, which any other plan can load. The same number of replicas loads what each replica has saved under
`replica/<r>of<n>/`, so that resuming is exact between two synchronisations too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.base.errors import CheckpointError, Problem
from parallelrun.checkpoint import storage
from parallelrun.checkpoint.find import keep_last, refuse_pickle, step_name
from parallelrun.checkpoint.index import (
    Index,
    StoredTensor,
    check_model,
    describe_plan,
    kept_key,
    replica_key,
    reshard_note,
    state_key,
    stored_tensors,
    verify_file,
    weight_key,
)
from parallelrun.checkpoint.schema import check_header, read_index
from parallelrun.checkpoint.storage import LocalPart
from parallelrun.checkpoint.together import CheckpointRanks
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Group, Mesh
from parallelrun.models.optimizers.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter, owns
from parallelrun.planner.contract.plan import Plan

PURPOSE = "checkpoint"
AsPart = Callable[[str, Tensor, LocalParameter], LocalPart]  # (key, tensor, parameter) -> this rank's box
StateOf = tuple[LocalParameter, dict[str, Tensor]]  # a parameter and its optimizer state


@dataclass(frozen=True)
class TrainingState:
    """What one rank saves and loads under its plan. kept: additional tensors of the data strategy, by kind."""

    parameters: Sequence[LocalParameter]
    optimizer: Optimizer
    plan: Plan
    mesh: Mesh
    kept: Mapping[str, Sequence[LocalParameter]] = field(default_factory=dict)


def parts_of(state: TrainingState) -> list[LocalPart]:
    """Return the parts that this rank writes: views of its weights, state and `kept`, and means over replicas.

    Collective over dp if replicas differ.
    """
    mesh, apart = state.mesh, replicas_differ(state.plan)
    as_part = partial(_part, mesh=mesh)
    first = dict.fromkeys(mesh.shape.mesh_dims_of(state.plan.worker_axis), 0) if apart else {}
    owned = _owned(state.parameters, mesh, {**mesh.coordinate, **first})
    parts = [part for p in owned for part in parts_to_save(p, state.optimizer, as_part)]
    if apart:
        parts = replica_parts_and_mean(parts, mesh, mesh.group(state.plan.worker_axis))
    for kind, others in state.kept.items():
        parts += [as_part(kept_key(kind, p.spec.name), p.tensor, p) for p in _owned(others, mesh, mesh.coordinate)]
    return parts


def write_parts(
    directory: Path,
    step: int,
    parts: Sequence[LocalPart],
    extra: Mapping[str, Any],
    plan: Plan,
    *,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> Path:
    """Write one rank's parts of `directory/step_<step>`, then delete all but the newest `keep` checkpoints.

    Collective over the group unless `alone`. A crash or an error at any moment leaves older checkpoints unchanged. All
    hosts must share the file system. keep < 1: all. For what it raises, see `CheckpointRanks.agree`.
    """
    target = Path(os.path.abspath(directory)) / step_name(step)
    ranks = CheckpointRanks(
        f"the checkpoint of step {step} could not be written to {target.parent}", True, group, alone
    )
    written = [part for part in parts if part.tensor.numel()]
    tensors: dict[str, StoredTensor] = {}  # on rank 0: of all ranks
    aside: Path | None = None  # likewise

    def create(described: Sequence[Any]) -> str:
        nonlocal aside
        tensors.update(stored_tensors(described, [storage.file_of_rank(rank) for rank in range(ranks.size)]))
        check_complete(tensors, plan)
        aside = storage.create_aside(target)
        return aside.name

    def write() -> tuple[int, str] | None:
        path = target.with_name(folder) / storage.file_of_rank(ranks.rank)
        return storage.write_part_file(path, written) if written else None

    def complete(results: Sequence[Any]) -> None:
        assert aside is not None
        files = {storage.file_of_rank(rank): (size[0], size[1]) for rank, size in enumerate(results) if size}
        storage.publish(Index(step, plan.optimizer, describe_plan(plan), extra, tensors, files), aside, target)

    try:
        folder = ranks.agree(lambda: [part.described for part in written], create)
        ranks.agree(write, complete)
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    keep_last(target.parent, keep, ranks.rank)
    return target


def check_complete(tensors: Mapping[str, StoredTensor], plan: Plan) -> None:
    """Assert that all weights are written, and each element of a tensor once."""
    absent = [name for name in plan.spec.parameters if weight_key(name) not in tensors]
    assert not absent, f"{len(absent)} weights are not written by any rank: {absent[0]} is the first"
    for key, tensor in tensors.items():
        written, begins = sum(part.numel for part in tensor.parts), {part.offsets for part in tensor.parts}
        is_right = written == prod(tensor.shape) and len(begins) == len(tensor.parts)
        assert is_right, f"the ranks' parts of {key} hold {written} elements of {list(tensor.shape)}"


def read_checked(path: Path, plan: Plan, ranks: CheckpointRanks, wants: Callable[[Index], list[LocalPart]]) -> Index:
    """Fill the parts that each rank wants of a checkpoint, and return its index.

    Each file is verified by one rank before any rank reads a tensor. For what it raises, see `CheckpointRanks.agree`.
    """
    index: Index
    parts: list[LocalPart] = []

    def verify() -> str:
        nonlocal index
        refuse_pickle(path)
        index = read_index(path)
        check_model(index, plan, path)
        parts.extend(wants(index))
        for name in sorted(index.files)[ranks.rank :: ranks.size]:
            verify_file(index, path, name)
            check_header(index, path, name)
        return index.digest

    def compare(digests: Sequence[str]) -> None:
        if len(set(digests)) > 1:
            raise CheckpointError(Problem(f"ranks see different checkpoints under {path}", where="resume"))

    ranks.agree(verify, compare)
    ranks.agree(lambda: storage.fill_parts(index, path, parts))
    return index


def load(path: Path, state: TrainingState) -> dict[str, Any]:
    """Fill the state from a checkpoint saved under any plan; return its `extra`.

    Collective. The caller must then call `DataRuntime.finish_update`. Each rank reads only the ranges it holds; tensors
    of `kept` that are not in the checkpoint stay unchanged. If it is damaged (size, sha256), incomplete, pickle, or of
    another model or optimizer, all ranks raise CheckpointError before any weight is changed.
    """
    path, mesh = Path(os.path.abspath(path)), state.mesh
    loaded: list[StateOf] = []

    def wants(index: Index) -> list[LocalPart]:
        parts, state_of_parameters = _parts_wanted(index, state)
        loaded.extend(state_of_parameters)
        return parts

    ranks = CheckpointRanks(f"{path} could not be loaded", saving=False, alone=mesh.shape.num_ranks == 1)
    index = read_checked(path, state.plan, ranks, wants)
    for parameter, values in loaded:
        state.optimizer.load_state(parameter.name, values)
    if mesh.rank == 0 and (note := reshard_note(index, state.plan)):
        print(note, flush=True)
    return dict(index.extra)


def _parts_wanted(index: Index, state: TrainingState) -> tuple[list[LocalPart], list[StateOf]]:
    """Return the parts that this rank fills from what `index` describes, and the new state of each parameter that has
    one, whose tensors some of the parts are."""
    group, as_part = state.mesh.group(state.plan.worker_axis), partial(_part, mesh=state.mesh)
    wanted, states = [], []
    for parameter in state.parameters:
        parts, values = parts_to_load(parameter, index, as_part)
        if values:
            states.append((parameter, values))
        for part in parts:
            own = replica_key(group.index, group.size, part.key)
            use_own = replicas_differ(state.plan) and own in index.tensors  # else the mean over replicas
            wanted.append(replace(part, key=own) if use_own else part)
    for kind, others in state.kept.items():
        parts = [as_part(kept_key(kind, p.spec.name), p.tensor, p) for p in others]
        wanted += [part for part in parts if part.key in index.tensors]
    return wanted, states


def _owned(parameters: Sequence[LocalParameter], mesh: Mesh, coordinate: Mapping[str, int]) -> list[LocalParameter]:
    """Return the parameters that the rank at `coordinate` writes, so that no other rank writes them too."""
    return [p for p in parameters if not p.shared and owns(p.layout, mesh.shape, coordinate)]


def replicas_differ(plan: Plan) -> bool:
    """Return whether there are several replicas with different weights."""
    return plan.data.independent and plan.num_replicas > 1


def replica_parts_and_mean(parts: list[LocalPart], mesh: Mesh, group: Group) -> list[LocalPart]:
    """Return this replica's parts under `replica_key`; on the first replica also the means, under the plain keys.

    Collective over the group: replicas have the same parts in the same order.
    """
    out = [replace(part, key=replica_key(group.index, group.size, part.key)) for part in parts]
    for part in parts:
        mean = part.tensor.detach().to(mesh.device, copy=True)
        if mean.numel():
            comm.all_reduce(mean, group, PURPOSE)
        mean /= group.size
        if group.index == 0:
            out.append(replace(part, tensor=mean.to(part.tensor.device)))
    return out


def parts_to_save(parameter: LocalParameter, optimizer: Optimizer, as_part: AsPart) -> list[LocalPart]:
    """Return this rank's parts of a parameter's weight and state."""
    parts = [as_part(weight_key(parameter.spec.name), parameter.tensor, parameter)]
    is_first = not any(parts[0].offsets)
    for kind, value in () if parameter.spec.frozen else optimizer.state(parameter.name).items():
        key = state_key(kind, parameter.spec.name)
        if value.dim():
            parts.append(as_part(key, value, parameter))
        elif is_first:  # one number per parameter: written by the rank with its first part
            parts.append(LocalPart(key, value, (), ()))
    return parts


def parts_to_load(
    parameter: LocalParameter, index: Index, as_part: AsPart
) -> tuple[list[LocalPart], dict[str, Tensor]]:
    """Return the parts of a parameter that are to be filled, and the state dict whose tensors some of them are."""
    name, tensor = parameter.spec.name, parameter.tensor
    parts = [as_part(weight_key(name), tensor, parameter)]
    state: dict[str, Tensor] = {}
    for kind in () if parameter.spec.frozen else index.state_kinds.get(name, ()):
        stored = index.tensors[state_key(kind, name)]
        dtype = getattr(torch, stored.dtype)
        if stored.shape:
            state[kind] = torch.zeros_like(tensor, dtype=dtype, requires_grad=False)
            parts.append(as_part(state_key(kind, name), state[kind], parameter))
        else:
            state[kind] = torch.zeros((), dtype=dtype)
            parts.append(LocalPart(state_key(kind, name), state[kind], (), ()))
    return parts, state


def _part(key: str, tensor: Tensor, parameter: LocalParameter, mesh: Mesh) -> LocalPart:
    """Return this rank's box of a logical tensor, without local padding beyond the logical range."""
    shape = tuple(parameter.spec.shape)
    ranges = parameter.layout.ranges(shape, mesh.shape.sizes, mesh.coordinate)
    view = tensor.detach()
    for dim, (start, stop) in enumerate(ranges):
        assert view.shape[dim] >= stop - start, f"{key} holds {tuple(tensor.shape)}, its layout says {ranges}"
        if view.shape[dim] > stop - start:
            view = view.narrow(dim, 0, stop - start)
    return LocalPart(key, view, shape, tuple(start for start, _ in ranges))
