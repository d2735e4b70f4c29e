"""Saves and loads a training's weights and optimizer state under any plan.

The weights of independent data replicas (local SGD, DiLoCo) differ. Their checkpoint has the mean over replicas under
the one-device names, which any other plan can load. The same number of replicas loads what each replica has saved under
`replica/<r>of<n>/`, so that resuming is exact between two synchronisations too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelrun.checkpoint import together
from parallelrun.checkpoint.explain import explained
from parallelrun.checkpoint.index import (
    Index,
    check_model,
    describe_plan,
    kept_key,
    replica_key,
    reshard_note,
    state_key,
    weight_key,
)
from parallelrun.checkpoint.planners import LocalPart, PartLoadPlanner, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from parallelrun.distributed import comm
from parallelrun.distributed.mesh import Mesh
from parallelrun.models.optimizer import Optimizer
from parallelrun.planner.contract.parameters import LocalParameter, owns
from parallelrun.planner.contract.plan import Plan

PURPOSE = "checkpoint"
AsPart = Callable[[str, Tensor, LocalParameter], LocalPart]  # (key, tensor, parameter) -> this rank's box


def parts_of(
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]],
) -> list[LocalPart]:
    """Return the parts that this rank writes: views of its weights, state and `kept`, and means over replicas.

    Collective over dp if replicas differ.
    """
    as_part = partial(_part, mesh=mesh)
    apart = replicas_differ(plan)
    owned = _owned(parameters, mesh, {**mesh.coordinate, "dp": 0} if apart else mesh.coordinate)
    parts = [part for p in owned for part in parts_to_save(p, optimizer, as_part)]
    if apart:
        parts = replica_parts_and_mean(parts, mesh)
    for kind, others in kept.items():
        parts += [as_part(kept_key(kind, p.spec.name), p.tensor, p) for p in _owned(others, mesh, mesh.coordinate)]
    return parts


def write_parts(
    directory: Path,
    step: int,
    parts: Sequence[LocalPart],
    extra: Mapping[str, Any],
    plan: Plan,
    rank: int,
    alone: bool,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write one rank's parts of `directory/step_<step>`. Collective over the group unless `alone`.

    rank: of this process in the group. For what it raises, see `checkpoint.explain`.
    """
    writer = SafetensorsWriter(directory, step, plan.optimizer, describe_plan(plan), extra)
    planner = PartSavePlanner(parts, [weight_key(name) for name in plan.spec.parameters])
    action = f"the checkpoint of step {step} could not be written to {writer.directory}"
    try:
        with explained(action, rank, saving=True):
            together.save(writer, planner, group, alone)
    finally:
        writer.discard()
    return writer.target


def read_parts(reader: SafetensorsReader, planner: PartLoadPlanner, rank: int, alone: bool) -> None:
    """Fill the planner's parts. Collective over the world unless `alone`. Raises: see `checkpoint.explain`."""
    with explained(f"{reader.path} could not be loaded", rank, saving=False):
        together.load(reader, planner, alone)


def load(
    path: Path,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Fill the parameters and the optimizer's state from a checkpoint saved under any plan; return its `extra`.

    Collective. The caller must then call `DataRuntime.finish_update`. Each rank reads only the ranges it holds; tensors
    of `kept` that are not in the checkpoint stay unchanged. If it is damaged (size, sha256), incomplete, pickle, or of
    another model or optimizer, all ranks raise CheckpointError before any weight is changed.
    """
    reader = SafetensorsReader(path, mesh.rank, mesh.shape.num_ranks)
    states: list[tuple[LocalParameter, dict[str, Tensor]]] = []

    def wanted() -> Iterator[LocalPart]:
        """Yield the parts that this rank needs, once the index has been read."""
        check_model(reader.index, plan, reader.path)
        parts, state_of_parameters = parts_wanted(reader.index, parameters, plan, mesh, kept)
        states.extend(state_of_parameters)
        yield from parts

    read_parts(reader, PartLoadPlanner(wanted()), mesh.rank, alone=mesh.shape.num_ranks == 1)
    for parameter, state in states:
        optimizer.load_state(parameter.name, state)
    if mesh.rank == 0 and (note := reshard_note(reader.index, plan)):
        print(note, flush=True)
    return dict(reader.index.extra)


def parts_wanted(
    index: Index,
    parameters: Sequence[LocalParameter],
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]],
) -> tuple[list[LocalPart], list[tuple[LocalParameter, dict[str, Tensor]]]]:
    """Return the parts that this rank fills from what `index` describes, and the new state of each parameter that has
    one, whose tensors some of the parts are."""
    group, as_part = mesh.group("dp"), partial(_part, mesh=mesh)
    wanted, states = [], []
    for parameter in parameters:
        parts, state = parts_to_load(parameter, index, as_part)
        if state:
            states.append((parameter, state))
        for part in parts:
            own = replica_key(group.index, group.size, part.key)
            use_own = replicas_differ(plan) and own in index.tensors  # else the mean over replicas
            wanted.append(replace(part, key=own) if use_own else part)
    for kind, others in kept.items():
        parts = [as_part(kept_key(kind, p.spec.name), p.tensor, p) for p in others]
        wanted += [part for part in parts if part.key in index.tensors]
    return wanted, states


def _owned(parameters: Sequence[LocalParameter], mesh: Mesh, coordinate: Mapping[str, int]) -> list[LocalParameter]:
    """Return the parameters that the rank at `coordinate` writes, so that no other rank writes them too."""
    return [p for p in parameters if not p.shared and owns(p.layout, mesh.shape, coordinate)]


def replicas_differ(plan: Plan) -> bool:
    """Return whether there are several replicas with different weights."""
    return plan.data.independent and plan.mesh.size("dp") > 1


def replica_parts_and_mean(parts: list[LocalPart], mesh: Mesh) -> list[LocalPart]:
    """Return this replica's parts under `replica_key`; on the first replica also the means, under the plain keys.

    Collective over dp: replicas have the same parts in the same order.
    """
    group = mesh.group("dp")
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
