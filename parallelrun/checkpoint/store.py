"""Save and load a training's weights and optimizer state under any plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from parallelrun.checkpoint import replicas
from parallelrun.checkpoint.index import (
    Index,
    check_model,
    describe_plan,
    kept_key,
    reshard_note,
    state_key,
    weight_key,
)
from parallelrun.checkpoint.planners import LocalPart, PartLoadPlanner, PartSavePlanner
from parallelrun.checkpoint.storage import SafetensorsReader, SafetensorsWriter
from parallelrun.errors import CheckpointError, ParallelrunError, PeerFailed, Problem, SaveFailed
from parallelrun.mesh import Mesh
from parallelrun.optimizer import Optimizer
from parallelrun.plan.parameters import LocalParameter, owns
from parallelrun.plan.structure import Plan

AsPart = Callable[[str, Tensor, LocalParameter], LocalPart]  # (key, tensor, parameter): the box that this rank holds


def save(
    directory: Path,
    step: int,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    extra: Mapping[str, Any],
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({}),
) -> Path:
    """Write `directory/step_<step>`; see `parallelrun.checkpoint.save`."""
    parts = _own_parts(parameters, optimizer, plan, mesh)
    for kind, others in kept.items():
        owned = [p for p in others if not p.shared and owns(p.layout, mesh.shape, mesh.coordinate)]
        parts += [_part(kept_key(kind, p.spec.name), p.tensor, p, mesh) for p in owned]
    return write_parts(directory, step, parts, extra, plan, mesh.rank, alone=mesh.shape.num_ranks == 1)


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

    rank: of this process in the group. Raises as `_raise_for_user` says.
    """
    writer = SafetensorsWriter(directory, step, plan.optimizer, describe_plan(plan), extra)
    planner = PartSavePlanner(parts, [weight_key(name) for name in plan.spec.parameters])
    try:
        with _one_process_is_fine():
            save_state({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    except CheckpointException as error:
        writer.discard()
        what = f"the checkpoint of step {step} could not be written to {writer.directory}"
        _raise_for_user(error, what, rank, saving=True)
    return writer.target


def read_parts(reader: SafetensorsReader, planner: PartLoadPlanner, rank: int, alone: bool) -> None:
    """Fill the planner's parts. Collective over the world unless `alone`. Raises as `_raise_for_user` says."""
    try:
        with _one_process_is_fine():
            load_state({}, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        _raise_for_user(error, f"{reader.path} could not be loaded", rank, saving=False)


def load(
    path: Path,
    parameters: Sequence[LocalParameter],
    optimizer: Optimizer,
    plan: Plan,
    mesh: Mesh,
    kept: Mapping[str, Sequence[LocalParameter]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Fill weights and optimizer state from a checkpoint; see `parallelrun.checkpoint.load`."""
    reader = SafetensorsReader(path, mesh.rank, mesh.shape.num_ranks)
    planner = _TrainingPlanner(reader, parameters, kept, plan, mesh)
    read_parts(reader, planner, mesh.rank, alone=mesh.shape.num_ranks == 1)
    for parameter, state in planner.states:
        if state:
            optimizer.load_state(parameter.name, state)
    if mesh.rank == 0 and (note := reshard_note(reader.index, plan)):
        print(note, flush=True)
    return dict(reader.index.extra)


class _TrainingPlanner(PartLoadPlanner):
    """Knows which parts a rank's training needs as soon as the index has been read and found to be of its model."""

    def __init__(
        self,
        reader: SafetensorsReader,
        parameters: Sequence[LocalParameter],
        kept: Mapping[str, Sequence[LocalParameter]],
        plan: Plan,
        mesh: Mesh,
    ):
        super().__init__([])
        self._reader, self._parameters, self._kept, self._plan, self._mesh = reader, parameters, kept, plan, mesh
        self.states: list[tuple[LocalParameter, dict[str, Tensor]]] = []

    def create_local_plan(self) -> LoadPlan:
        check_model(self._reader.index, self._plan, self._reader.path)
        index, mesh = self._reader.index, self._mesh
        for parameter in self._parameters:
            parts, state = parts_to_load(parameter, index, partial(_part, mesh=mesh))
            self._parts += [replicas.of_this_one(part, index, self._plan, mesh) for part in parts]
            self.states.append((parameter, state))
        for kind, others in self._kept.items():
            parts = [_part(kept_key(kind, p.spec.name), p.tensor, p, mesh) for p in others]
            self._parts += [part for part in parts if part.key in index.tensors]
        return super().create_local_plan()


def _own_parts(parameters: Sequence[LocalParameter], optimizer: Optimizer, plan: Plan, mesh: Mesh) -> list[LocalPart]:
    """What this rank writes of weights and state: nothing that another rank writes too.

    Independent replicas write what each of them holds, and together their mean under the one-device names.
    """
    if not replicas.are_apart(plan):
        owned = [p for p in parameters if not p.shared and owns(p.layout, mesh.shape, mesh.coordinate)]
        return [part for p in owned for part in parts_to_save(p, optimizer, partial(_part, mesh=mesh))]
    coordinate = {**mesh.coordinate, "dp": 0}
    owned = [p for p in parameters if not p.shared and owns(p.layout, mesh.shape, coordinate)]
    return replicas.apart_and_mean(
        [q for p in owned for q in parts_to_save(p, optimizer, partial(_part, mesh=mesh))], mesh
    )


def parts_to_save(parameter: LocalParameter, optimizer: Optimizer, as_part: AsPart) -> list[LocalPart]:
    """The parts of a parameter's weight and state as this rank holds them."""
    parts = [as_part(weight_key(parameter.spec.name), parameter.tensor, parameter)]
    is_first = not any(parts[0].offsets)
    for kind, value in () if parameter.spec.frozen else optimizer.state(parameter.name).items():
        key = state_key(kind, parameter.spec.name)
        if value.dim():
            parts.append(as_part(key, value, parameter))
        elif is_first:  # one number for the whole tensor: written by the rank of its first part
            parts.append(LocalPart(key, value, (), ()))
    return parts


def parts_to_load(
    parameter: LocalParameter, index: Index, as_part: AsPart
) -> tuple[list[LocalPart], dict[str, Tensor]]:
    """The parts of a parameter that are to be filled, and the state dict some of them will make up."""
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
    """This rank's box of a logical tensor; local padding beyond the logical range is cut off."""
    shape = tuple(parameter.spec.shape)
    ranges = parameter.layout.ranges(shape, mesh.shape.sizes, mesh.coordinate)
    view = tensor.detach()
    for dim, (start, stop) in enumerate(ranges):
        assert view.shape[dim] >= stop - start, f"{key} holds {tuple(tensor.shape)}, its layout says {ranges}"
        view = view.narrow(dim, 0, stop - start)
    return LocalPart(key, view, shape, tuple(start for start, _ in ranges))


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _raise_for_user(error: CheckpointException, what: str, rank: int, saving: bool) -> NoReturn:
    """End a save or load that failed on some ranks: every rank raises, and the rank that failed is told apart.

    rank: of this process among those that save or load together. A disk that cannot be written raises SaveFailed, a
    checkpoint that cannot be read CheckpointError, on all ranks alike. Any other exception is raised again where it
    happened, and PeerFailed on the other ranks.
    """
    failures = {one: cause for one, (cause, _) in error.failures.items()}
    interrupted = [cause for cause in failures.values() if isinstance(cause, (KeyboardInterrupt, SystemExit))]
    if interrupted:
        raise interrupted[0] from None
    known = [one for one, cause in sorted(failures.items()) if isinstance(cause, ParallelrunError)]
    first = known[0] if known else min(failures)
    cause = failures[first]
    said = f"{what}: rank {first}: {_words(cause)}"
    if len(failures) > 1:
        said += f" (and {len(failures) - 1} more ranks)"
    told: ParallelrunError | None = cause if isinstance(cause, ParallelrunError) else None
    if isinstance(cause, OSError) and cause.errno is not None and not isinstance(cause, ConnectionError):
        untouched = Problem(f"{said}; earlier checkpoints are untouched", where="runs")
        told = SaveFailed(untouched) if saving else CheckpointError(Problem(said, where="resume"))
    elif isinstance(cause, SafetensorError) and not saving:
        told = CheckpointError(Problem(said, where="resume"))
    if told is None and rank == first:
        raise cause from error
    told = told or PeerFailed(Problem(said))
    told.of_another_rank = rank != first
    raise told from (None if told is cause else cause)


def _words(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return f"{cause.strerror}{f': {cause.filename}' if cause.filename else ''}"
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
